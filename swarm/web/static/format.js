"use strict";
// How figures are written, the same as in the terminal.

const format = (() => {
  const UNITS = ["", "k", "M", "G", "T", "P"];

  function scaled(value, base, units) {
    let index = 0;
    while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index += 1; }
    return [value, units[index]];
  }

  // 3 digits: 1234567 is 1.23M.
  function count(value) {
    if (value == null || !isFinite(value)) return "–";
    const [small, unit] = scaled(value, 1000, UNITS);
    return unit === "" ? String(Math.round(small * (small < 10 ? 10 : 1)) / (small < 10 ? 10 : 1)) : small.toPrecision(3) + unit;
  }

  function bytes(value) {
    if (value == null) return "–";
    const [small, unit] = scaled(value, 1000, UNITS);
    return `${unit === "" ? Math.round(small) : small.toPrecision(3)} ${unit}B`;
  }

  function duration(seconds) {
    if (seconds == null || !isFinite(seconds)) return "–";
    const whole = Math.max(0, Math.round(seconds));
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
    if (whole < 172800) return `${Math.floor(whole / 3600)} h ${String(Math.floor(whole / 60) % 60).padStart(2, "0")} min`;
    return `${Math.floor(whole / 86400)} days ${Math.floor(whole / 3600) % 24} h`;
  }

  const loss = (value) => (value == null ? "–" : value.toFixed(4));
  const percent = (share) => (share > 0 && share < 0.01 ? "<1%" : `${Math.round(100 * share)}%`);
  const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  const time = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleString();

  return { count, bytes, duration, loss, percent, many, time };
})();

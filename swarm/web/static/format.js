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

  // 0.0042 USD, 12.30 USD: two digits behind the point, or two that count.
  function money(amount, currency) {
    if (amount >= 1e15) return `${amount.toExponential(2)} ${currency}`;
    const digits = amount >= 0.1 || amount < 1e-9 ? 2 : 1 - Math.floor(Math.log10(amount));
    return `${amount.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${currency}`;
  }

  // 250 W, 1.2 kW: three digits with the prefix that suits.
  function metric(amount, unit) {
    const [small, prefix] = scaled(Number(amount.toPrecision(3)), 1000, [...UNITS, "E"]);
    return `${Number(small.toPrecision(3))} ${prefix}${unit}`;
  }

  const energy = (joules) => (joules >= 3600 ? metric(joules / 3600, "Wh") : metric(joules, "J"));
  const loss = (value) => (value == null ? "–" : value.toFixed(4));
  const percent = (share) => (share > 0 && share < 0.01 ? "<1%" : `${Math.round(100 * share)}%`);
  const many = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  const time = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleString();

  return { count, bytes, duration, money, metric, energy, loss, percent, many, time };
})();

"use strict";
// The two charts and the strip of rounds. They are given the rounds by column, as rounds.json has them.

const charts = (() => {
  // light-dark() is not resolved in a custom property: in an element's own colour it is.
  const probe = document.createElement("span");
  function resolved(name) {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }

  const POINTS = 1500; // as many as a screen has columns; of more rounds, means of neighbours are drawn

  function thinned(xs, ...series) {
    const step = Math.ceil(xs.length / POINTS);
    if (step <= 1) return [xs, ...series];
    const kept = [];
    for (let end = step - 1; end < xs.length + step - 1; end += step) kept.push(Math.min(end, xs.length - 1));
    const mean = (values) => kept.map((end, index) => {
      const part = values.slice(index * step, end + 1).filter((value) => value != null);
      return part.length ? part.reduce((sum, value) => sum + value, 0) / part.length : null;
    });
    return [kept.map((end) => xs[end]), ...series.map(mean)];
  }

  // Lines over the same horizontal axis; lines: label, colour, and how a value is written.
  class Chart {
    constructor(element, lines, axisOfSecond) {
      this.element = element;
      this.lines = lines;
      this.second = axisOfSecond;
      this.data = [[], ...lines.map(() => [])];
      this.time = false;
      new ResizeObserver(() => this.resize()).observe(element);
    }

    size() {
      return { width: Math.max(200, this.element.clientWidth), height: this.element.clientHeight - (this.element.clientWidth < 420 ? 56 : 30) };
    }

    resize() {
      if (this.plot) this.plot.setSize(this.size());
    }

    // Made anew for another kind of axis or another colour scheme.
    make() {
      if (this.plot) this.plot.destroy();
      const grid = { stroke: resolved("--line"), width: 1 };
      const axis = { stroke: resolved("--dim"), grid, ticks: { show: false }, font: "11px system-ui" };
      const small = (u, values) => values.map((value) => (Math.abs(value) >= 1000 ? format.count(value) : String(+value.toPrecision(6))));
      const axes = [{ ...axis, size: this.time ? 44 : 30, ...(this.time ? {} : { values: small }) }, { ...axis, values: small, size: 52 }];
      if (this.second) axes.push({ ...axis, scale: this.second, side: 1, values: small, size: 40, grid: { show: false } });
      const series = this.lines.map((line) => ({
        label: line.label, scale: line.scale || "y", stroke: resolved(line.colour), width: 1.7,
        dash: line.dash, points: { show: Boolean(line.points) || this.data[0].length < 40, size: 5 }, spanGaps: true,
        value: (u, value) => (value == null ? "–" : line.write(value)),
      }));
      const x = { label: this.time ? "time" : "tokens", value: (u, value) => (value == null ? "–" : this.time ? format.time(value) : format.count(value)) };
      const scales = { x: { time: this.time }, y: { range: (u, low, high) => this.range(low, high, false) } };
      if (this.second) scales[this.second] = { range: (u, low, high) => this.range(low, high, true) };
      this.plot = new uPlot({ ...this.size(), axes, scales, series: [x, ...series], cursor: { y: false } }, this.data, this.element);
    }

    range(low, high, fromZero) {
      if (low == null) return [0, 1];
      const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
      return [fromZero || this.lines[0].fromZero ? 0 : low - margin, high + margin];
    }

    // Each table has its own xs and one or more series.
    set(time, ...tables) {
      const drawn = tables.map((table) => thinned(...table));
      const some = drawn.filter((table, index) => index === 0 || table[0].length);
      const data = some.length > 1 ? uPlot.join(some) : some[0];
      while (data.length < this.lines.length + 1) data.push(data[0].map(() => null));
      const remake = !this.plot || time !== this.time || (this.data[0].length < 40) !== (data[0].length < 40);
      this.time = time;
      this.data = data;
      if (remake) this.make(); else this.plot.setData(this.data);
    }
  }

  const CELL = 9, GAP = 2;

  // Cells, one a round, the newest at the right; as high as its tokens.
  class Strip {
    constructor(canvas, onChoice) {
      this.canvas = canvas;
      this.onChoice = onChoice;
      this.rounds = { round: [] };
      this.chosen = null;
      this.last = null; // index of the newest round shown; null: of all
      canvas.addEventListener("pointermove", (event) => this.point(event));
      canvas.addEventListener("click", (event) => this.point(event));
      canvas.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.draw()).observe(canvas);
    }

    set(rounds) {
      this.rounds = rounds;
      this.draw();
    }

    shown() {
      const fit = Math.max(1, Math.floor(this.canvas.clientWidth / (CELL + GAP)));
      const count = this.rounds.round.length;
      const stop = this.last == null ? count : Math.min(count, this.last + 1);
      return [Math.max(0, stop - fit), stop];
    }

    point(event) {
      const [start, stop] = this.shown();
      const index = start + Math.floor((event.clientX - this.canvas.getBoundingClientRect().left) / (CELL + GAP));
      if (index < stop) this.choose(index);
    }

    key(event) {
      const count = this.rounds.round.length;
      if (!count) return;
      const at = this.chosen == null ? count : this.chosen;
      const [start, stop] = this.shown();
      const page = Math.max(1, stop - start - 1);
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1, PageUp: at - page, PageDown: at + page };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const index = Math.max(0, Math.min(count - 1, moves[event.key]));
      if (index < start) this.last = index + page;
      else if (index >= stop) this.last = index;
      if (index === count - 1) this.last = null;
      this.choose(index);
    }

    choose(index) {
      if (index === this.chosen) return;
      this.chosen = index;
      this.draw();
      this.onChoice(index);
    }

    draw() {
      const canvas = this.canvas, ratio = window.devicePixelRatio || 1;
      const width = canvas.clientWidth, height = canvas.clientHeight;
      if (!width) return;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const [start, stop] = this.shown();
      let most = 1;
      for (let index = start; index < stop; index += 1) most = Math.max(most, this.rounds.tokens[index]);
      const colours = { committed: resolved("--good"), aborted: resolved("--warn"), undone: resolved("--bad") };
      const ink = resolved("--ink");
      for (let index = start; index < stop; index += 1) {
        const state = this.rounds.state[index];
        const tall = state === "aborted" ? 0.5 : 0.25 + (0.75 * this.rounds.tokens[index]) / most;
        const x = (index - start) * (CELL + GAP), cell = Math.round((height - 8) * tall), y = height - 4 - cell;
        // Told apart without colours, too: full, hollow, hatched.
        if (state === "committed") {
          pen.fillStyle = colours.committed;
          pen.fillRect(x, y, CELL, cell);
        } else {
          pen.strokeStyle = colours[state];
          pen.lineWidth = 1.6;
          pen.strokeRect(x + 1, y + 1, CELL - 2, cell - 2);
          for (let line = y + cell; state === "undone" && line > y + 4; line -= 5) {
            pen.beginPath(); pen.moveTo(x + 1, line - 1); pen.lineTo(x + CELL - 1, line - 5); pen.stroke();
          }
        }
        if (index === this.chosen) {
          pen.strokeStyle = ink;
          pen.lineWidth = 2;
          pen.strokeRect(x - 0.5, y - 2, CELL + 1, cell + 4);
        }
      }
    }
  }

  document.addEventListener("DOMContentLoaded", () => { probe.hidden = true; document.body.append(probe); });
  return { Chart, Strip };
})();

"use strict";
// The table of members. Of many only the rows on the screen are elements, so that a thousand members cost a frame what
// fifty do.

const members = (() => {
  const { $, write, make } = dom;
  const SHOWN = 100; // at first; of more members only those on the screen are elements
  const ROW = 31, MARGIN = 6; // px, as page.css has it; rows beyond the edges of the screen
  const compare = new Intl.Collator().compare;

  const inOrder = (one, two) => two.alive - one.alive || two.share - one.share || compare(one.name, two.name) || (one.peer < two.peer ? -1 : 1);

  const reach = (one) => {
    if (one.wall) return "cannot take part";
    const kinds = {};
    for (const path of one.paths) kinds[path.kind] = (kinds[path.kind] || 0) + 1;
    const words = Object.entries(kinds).sort().map(([kind, number]) => `${number} ${kind}`).join(", ");
    return words || (one.reachable ? "public" : one.relayed ? "relayed" : "unreachable");
  };

  function cells(one, staged) {
    const doing = one.alive ? one.activity + (one.synced ? "" : ", no state yet") : one.left || "gone";
    const spent = one.times && cards.PHASES.reduce((sum, phase) => sum + one.times[phase], 0);
    return [
      one.device.name, doing, ...(staged ? [one.stages ? (one.stages[0] === one.stages[1] ? String(one.stages[0]) : one.stages.join(" to ")) : "–"] : []),
      one.alive ? format.count(one.tokens_per_s) : "–", one.alive && spent ? format.percent(one.times.compute / spent) : "–", format.percent(one.share), format.loss(one.loss),
      format.bytes(one.bytes_sent), format.bytes(one.bytes_received), reach(one),
    ];
  }

  function newRow(staged) {
    const width = staged ? 10 : 9;
    const row = make("tr"), who = make("td");
    who.append(make("b"), " ", make("span", null, "id"));
    row.append(who);
    for (let number = 0; number < width; number += 1) {
      const isFigure = number >= (staged ? 3 : 2) && number < width - 1;
      row.append(make("td", "", isFigure ? "num" : ""));
    }
    return row;
  }

  function entitle(element, words) {
    const title = dom.clean(words);
    if (element.title !== title) element.title = title;
  }

  class Table {
    constructor(table, more) {
      this.table = table;
      this.body = table.tBodies[0];
      this.more = more;
      this.rows = [];
      this.first = 0;
      this.ordered = [];
      this.staged = false;
      this.mine = "";
      this.all = false;
      this.gaps = [make("tbody"), make("tbody")]; // as high as the rows that are not there
      for (const gap of this.gaps) { gap.setAttribute("aria-hidden", "true"); gap.append(make("tr")); gap.firstChild.append(make("td")); }
      more.onclick = () => { this.all = !this.all; this.draw(); };
      let asked = false;
      const moved = () => {
        if (asked || this.ordered.length <= SHOWN) return;
        asked = true;
        requestAnimationFrame(() => { asked = false; this.draw(); });
      };
      window.addEventListener("scroll", moved, { passive: true });
      window.addEventListener("resize", moved);
    }

    // ``staged``: whether there is a column of stages; ``mine``: the beginning of a peer's id.
    set(list, staged, mine) {
      this.ordered = [...list].sort(inOrder);
      if (staged !== this.staged) this.rows.splice(0).forEach((row) => row.remove());
      this.staged = staged;
      this.mine = mine;
      this.draw();
    }

    // The first member in the window and the one after the last; reads the layout, so it comes before any change.
    range(count) {
      const top = this.table.getBoundingClientRect().top + ROW;
      const first = Math.max(0, Math.min(count - 1, Math.floor(-top / ROW) - MARGIN));
      const stop = Math.ceil((window.innerHeight - top) / ROW) + MARGIN;
      return [first, Math.min(count, Math.max(stop, first + MARGIN))];
    }

    draw() {
      const isLarge = this.ordered.length > SHOWN;
      const count = isLarge && !this.all ? SHOWN : this.ordered.length;
      const [first, stop] = isLarge ? this.range(count) : [0, count];
      this.move(first, stop - first);
      this.rows.forEach((row, place) => this.fill(row, this.ordered[first + place], isLarge ? first + place + 2 : null));
      this.table.classList.toggle("windowed", isLarge);
      if (isLarge) this.table.setAttribute("aria-rowcount", String(count + 1)); else this.table.removeAttribute("aria-rowcount");
      this.leave(this.gaps[0], first, (gap) => this.body.before(gap));
      this.leave(this.gaps[1], count - stop, (gap) => this.body.after(gap));
      this.more.hidden = !isLarge;
      write(this.more, this.all ? `Show the first ${SHOWN}` : `Show all ${this.ordered.length}`);
    }

    // Have as many rows, the first of them for the member of this number; those that stay in the window keep theirs.
    move(first, count) {
      const by = first - this.first, rows = this.rows;
      if (by > 0 && by < rows.length) {
        const off = rows.splice(0, by);
        rows.push(...off);
        this.body.append(...off);
      } else if (by < 0 && -by < rows.length) {
        const off = rows.splice(by);
        rows.unshift(...off);
        this.body.prepend(...off);
      }
      this.first = first;
      while (rows.length > count) rows.pop().remove();
      while (rows.length < count) { rows.push(newRow(this.staged)); this.body.append(rows[rows.length - 1]); }
    }

    fill(row, one, number) {
      const who = row.firstElementChild;
      write(who.firstElementChild, one.name);
      write(who.lastElementChild, one.peer.slice(0, 8));
      entitle(who, `${one.name} ${one.peer}`);
      cells(one, this.staged).forEach((text, place) => write(row.children[place + 1], text));
      entitle(row.children[2], one.wall || one.trouble);
      const kind = `${one.alive ? "" : "gone"} ${this.mine && one.peer.startsWith(this.mine) ? "mine" : ""}`.trim();
      if (row.className !== kind) row.className = kind;
      if (number) row.setAttribute("aria-rowindex", String(number)); else row.removeAttribute("aria-rowindex");
    }

    leave(gap, rows, put) {
      if (!rows) { gap.remove(); return; }
      const height = `${rows * ROW}px`, row = gap.firstChild;
      if (row.style.height !== height) row.style.height = height;
      if (!gap.isConnected) put(gap);
    }
  }

  return { Table };
})();

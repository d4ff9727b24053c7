"use strict";
// Elements and text of the page. All text is set as text, never as markup: names, troubles and samples are written by
// strangers, and by a model.

const dom = (() => {
  const $ = (id) => document.getElementById(id);

  // Without control characters, and marks that turn the direction of what stands beside them.
  // eslint-disable-next-line no-control-regex
  const UNSEEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
  const clean = (text) => String(text).replace(UNSEEN, "\u00b7");

  function write(element, text) {
    const shown = clean(text);
    if (element.textContent !== shown) element.textContent = shown;
  }

  function make(tag, text, kind) {
    const element = document.createElement(tag);
    if (text != null) element.textContent = clean(text);
    if (kind) element.className = kind;
    return element;
  }

  const fill = (element, ...children) => element.replaceChildren(...children);

  const pairs = (list, entries) => fill(list, ...entries.flatMap(([name, text]) => [make("dt", name), make("dd", text)]));

  // A bar of progress whose element in the page has the role.
  function bar(element, share) {
    const whole = Math.round(1000 * Math.max(0, Math.min(1, share || 0))) / 10;
    element.style.width = `${whole}%`;
    element.parentElement.setAttribute("aria-valuenow", String(whole));
  }

  // A bar beside words that say the same.
  function track(share) {
    const outer = make("div", null, "bar"), filled = make("i");
    filled.style.width = `${Math.round(1000 * Math.max(0, Math.min(1, share || 0))) / 10}%`;
    outer.append(filled);
    return outer;
  }

  // A bar of several parts, with a legend that names each: [[name, value, words], ...].
  function parts(entries) {
    const whole = entries.reduce((sum, [, value]) => sum + value, 0);
    const shown = entries.filter(([, value]) => value > 0.004 * whole);
    const line = make("div", null, "parts"), legend = make("ul", null, "legend");
    line.setAttribute("aria-hidden", "true");
    for (const [name, value, words] of shown) {
      const part = make("i", null, `of-${name}`);
      part.style.flexGrow = String(value / whole);
      line.append(part);
      const item = make("li");
      item.append(make("span", null, `key of-${name}`), make("span", words));
      legend.append(item);
    }
    return [line, legend];
  }

  return { $, clean, write, make, fill, pairs, bar, track, parts };
})();

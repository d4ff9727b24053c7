"use strict";
// Cards of the page that need nothing but what they are given: runs of a host, where the time goes, the model's texts.

const cards = (() => {
  const { $, make, fill, write, pairs, track, parts } = dom;
  const PHASES = ["compute", "data", "packing", "exchange", "waiting", "applying", "checkpoint"];
  const seconds = (value) => (value < 10 ? `${value.toFixed(1)} s` : format.duration(value));

  // Progress towards the goal that is reached first: [share, words]; null without a goal.
  function progress(goals, tokens, rounds, elapsed_s) {
    const found = [];
    if (goals.tokens) found.push([tokens / goals.tokens, `${format.count(tokens)} of ${format.count(goals.tokens)} tokens`]);
    if (goals.rounds) found.push([rounds / goals.rounds, `${rounds} of ${format.many(goals.rounds, "round")}`]);
    if (goals.max_s) found.push([elapsed_s / goals.max_s, `${format.duration(elapsed_s)} of ${format.duration(goals.max_s)}`]);
    return found.sort((one, two) => two[0] - one[0])[0] || null;
  }

  // Cards of all runs of a host, each a link to the run's own page.
  function runs(list) {
    fill($("runs-list"), ...list.map((run) => {
      const card = make("a", null, "card run");
      card.href = `?run=${encodeURIComponent(run.name)}`;
      const goal = run.phase && progress(run.goals, run.tokens_committed, run.rounds_committed, run.elapsed_s);
      const head = make("div", null, "two");
      head.append(make("h2", run.title || run.name), make("span", run.phase || "not known", `pill ${run.phase || "quiet"}`));
      const about = `${run.name} · ${run.recipe}${run.elements ? `, ${format.count(run.elements)} parameters` : ""}`;
      card.append(head, make("p", about, "dim"), make("p", run.purpose || "", "purpose"), track(goal ? goal[0] : 0));
      if (run.phase) {
        card.append(make("p", goal ? `${goal[1]}, ${format.percent(Math.min(1, goal[0]))}` : `${format.count(run.tokens_committed)} tokens so far`));
        card.append(make("p", `loss ${format.loss(run.loss)} · ${format.many(run.members, "member")} · ${format.count(run.tokens_per_s)} tokens/s`, "dim"));
      }
      const waits = run.warning || (run.phase === "ended" ? "" : run.waits_for);
      if (waits) card.append(make("p", waits, "warn"));
      return card;
    }));
  }

  // Where the time of the last round went, and that of its members.
  function time(status, named) {
    const timing = status.timing;
    $("time-card").hidden = !timing;
    if (!timing) return;
    write($("time-title"), `Where the time of round ${timing.round} went`);
    const steps = [["compute", timing.work_s, `training ${seconds(timing.work_s)}`], ["waiting", timing.gather_s, `gathering ${seconds(timing.gather_s)}`],
      ["exchange", timing.exchange_s, `averaging ${seconds(timing.exchange_s)}`]];
    fill($("time-round"), make("h3", `The round: ${seconds(timing.wall_s)}`), ...parts(steps));
    const mean = timing.mean;
    const whole = mean ? PHASES.reduce((sum, phase) => sum + mean[phase], 0) : 0;
    const shares = whole ? PHASES.map((phase) => [phase, mean[phase], `${phase} ${format.percent(mean[phase] / whole)}`]) : [];
    fill($("time-members"), ...(whole ? [make("h3", "Its members, by their own account"), ...parts(shares)] : []));
    const path = timing.path;
    write($("time-path"), path ? path.text : "Nobody kept the others waiting.");
    $("time-path").className = path ? "warn" : "dim";
    $("time-path").title = path ? named(path.peer) : "";
  }

  // What the run has cost, and what energy it took, as members say; nothing where nobody says anything.
  function costs(told) {
    const isPriced = told.cost != null || told.provider_cost != null;
    $("costs-card").hidden = !isPriced && told.energy_j == null;
    if ($("costs-card").hidden) return;
    const of = (some) => (some < told.members ? `${some} of ${format.many(told.members, "member")} say` : "as members say");
    const money = (amount) => format.money(amount, told.currency);
    const entries = [];
    if (told.cost != null) entries.push(["the run", `${money(told.cost)}, ${of(told.priced_members)}`]);
    if (told.round_cost != null) entries.push(["the last round", money(told.round_cost)]);
    if (told.million_tokens_cost != null) entries.push(["a million tokens", money(told.million_tokens_cost)]);
    if (told.provider_cost != null) {
      const left = told.provider_unlisted_device_s;
      entries.push([told.provider ? `at ${told.provider}'s prices` : "at the run file's prices", `${money(told.provider_cost)}${left ? `, without ${format.duration(left)} of devices that it does not list` : ""}`]);
    }
    pairs($("costs"), entries);
    const energy = [];
    if (told.energy_j != null) energy.push(["the run", `${format.energy(told.energy_j)}, ${of(told.metered_members)}`]);
    if (told.round_energy_j != null) energy.push(["the last round", format.energy(told.round_energy_j)]);
    if (told.token_energy_j != null) energy.push(["a token", format.energy(told.token_energy_j)]);
    $("cost-part").hidden = !entries.length;
    $("energy-part").hidden = !energy.length;
    pairs($("energy"), energy);
  }

  // What the model writes after each prompt, by version, with a chooser. The newest is shown until another is chosen.
  let chosen = null, told = "";

  function texts(status) {
    const versions = status.evaluation ? status.evaluation.texts : [];
    $("texts-card").hidden = !versions.length;
    if (!versions.length) return;
    const chooser = $("texts-round"), last = versions.length - 1;
    const at = chosen == null ? last : Math.max(0, versions.findIndex((one) => one.version === chosen));
    const shown = versions[at];
    const now = JSON.stringify([at, versions.map((one) => one.version), shown]);
    if (now === told) return;
    told = now;
    chooser.max = String(last);
    chooser.value = String(at);
    chooser.disabled = !last;
    chooser.setAttribute("aria-valuetext", `after round ${shown.round}`);
    chooser.oninput = () => {
      const index = Number(chooser.value);
      chosen = index === last ? null : versions[index].version;
      texts(status);
    };
    const figure = status.evaluation.figures.find((one) => one.version === shown.version);
    write($("texts-which"), `after round ${shown.round}${figure && figure.loss != null ? `, held-out loss ${format.loss(figure.loss)}` : ""}`);
    write($("texts-by"), `Measured by ${shown.validator.slice(0, 8)}. ${format.many(versions.length, "version")} to choose from.`);
    fill($("texts"), ...shown.texts.map((one) => {
      const text = make("pre", null, "text");
      text.append(make("b", one.prompt || "(from the beginning)"), make("span", one.text));
      return text;
    }));
  }

  return { PHASES, progress, runs, time, costs, texts, seconds };
})();

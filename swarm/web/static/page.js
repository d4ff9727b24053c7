"use strict";
// Shows one run: what the server's events say, or, in a copy of a finished run, what data.js has set.

(() => {
  const copy = window.shoalCopy || null;
  const { $, write, make, fill, pairs, bar, track, parts } = dom;

  let facts = null, status = null, rounds = null;
  let runName = null, loading = false, chosenRound = null, byTime = false;
  let names = new Map(), table = null;

  const named = (peer) => (names.has(peer) ? `${names.get(peer)} ${peer.slice(0, 8)}` : peer.slice(0, 8));

  // What is asked ------------------------------------------------------------------------------------------

  const at = (path, query = "") => `${path}?run=${encodeURIComponent(runName)}${query}`;

  async function get(url) {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
    return answer.json();
  }

  function append(more) {
    if (!rounds) { rounds = more; return; }
    for (const name of Object.keys(more)) rounds[name].push(...more[name]);
  }

  async function loadRounds() {
    if (loading) return;
    loading = true;
    try {
      for (;;) {
        const known = rounds && rounds.round.length ? rounds.round[rounds.round.length - 1] + 1 : 0;
        if (rounds && known >= status.next_round) break;
        const into = rounds;
        const more = await get(at("rounds.json", `&from=${known}`));
        if (into !== rounds) continue; // they have begun anew meanwhile
        append(more);
        if (!more.round.length) break;
      }
      drawRounds();
    } catch (error) {
      console.info("rounds are asked for again later", error);
    } finally {
      loading = false;
    }
  }

  function taken(next) {
    const undone = status && status.undone_rounds !== next.undone_rounds;
    if (status && status.facts !== next.facts) loadFacts();
    if (status && status.run_hash !== next.run_hash) { location.reload(); return; } // another run of this name
    status = next;
    if (undone) rounds = null;
    drawSoon();
    if (!rounds || (rounds.round[rounds.round.length - 1] ?? -1) + 1 < status.next_round) loadRounds();
  }

  // An amendment may have changed the goals, the card, or who may join.
  async function loadFacts() {
    try {
      facts = await get(at("run.json"));
      drawFacts();
      drawSoon();
    } catch (error) {
      if (status) status.facts = ""; // again with the next status
    }
  }

  function merged(delta) {
    const next = { ...status, ...delta };
    const changed = new Map(delta.members.map((one) => [one.peer, one]));
    const gone = new Set(delta.gone);
    next.members = status.members.filter((one) => !gone.has(one.peer)).map((one) => ({ ...one, ...changed.get(one.peer) }));
    const known = new Set(status.members.map((one) => one.peer));
    for (const one of delta.members) if (!known.has(one.peer)) next.members.push(one);
    delete next.gone;
    return next;
  }

  let events = null, poll = null;

  function follow() {
    if (events) events.close();
    events = new EventSource(at("events"));
    events.addEventListener("status", (event) => { clearInterval(poll); poll = null; told("live"); taken(JSON.parse(event.data)); });
    events.addEventListener("delta", (event) => { told("live"); if (status) taken(merged(JSON.parse(event.data))); });
    events.onerror = () => {
      told(events.readyState === EventSource.CLOSED ? "asking now and then" : "connecting again");
      if (events.readyState === EventSource.CLOSED && !poll) poll = setInterval(ask, 15000);
    };
  }

  // Where the server has no place for another stream.
  async function ask() {
    try {
      taken(await get(at("status.json")));
      told("asking now and then");
      follow();
    } catch (error) {
      told("the host does not answer");
    }
  }

  function told(words) {
    const link = $("link");
    link.classList.toggle("lost", words !== "live");
    write(link, words);
  }

  // What is shown ------------------------------------------------------------------------------------------

  let isDue = false;

  // Once a frame at most, and not while nobody sees it.
  function drawSoon() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
      requestAnimationFrame(drawMembers); // in a frame of its own
    });
  }

  function draw() {
    if (!status || !facts) return;
    names = new Map(status.members.map((one) => [one.peer, one.name]));
    const here = status.members.filter((one) => one.alive);
    const phase = $("phase");
    phase.className = `pill ${status.phase}`;
    write(phase, status.phase);
    drawGoal();
    drawTiles(here);
    drawOwn();
    drawStages();
    drawBytes();
    drawEvaluations();
    cards.time(status, named);
    cards.costs(status.costs);
    cards.texts(status);
    write($("chain"), `chain ${status.chain} · run ${status.run_hash}`);
  }

  function drawGoal() {
    const goal = cards.progress(facts.goals, status.tokens_committed, status.rounds_committed, status.elapsed_s);
    const share = goal ? goal[0] : 0;
    const ended = status.phase === "ended";
    write($("goal-text"), goal ? `${goal[1]}, ${format.percent(Math.min(1, share))}` : `${format.count(status.tokens_committed)} tokens so far`);
    const left = !ended && share > 0.002 && share < 1 ? `about ${format.duration((status.elapsed_s * (1 - share)) / share)} left` : "";
    write($("goal-left"), `running for ${format.duration(status.elapsed_s)}${left ? ` · ${left}` : ""}`);
    bar($("goal-bar"), share);
    const said = [status.warning, status.journal, status.waits_for, status.stopping].filter((words) => words);
    write($("waits"), said.join(" · ") || "\u00a0");
    $("waits").classList.toggle("calm", ended && !status.warning);
    document.title = `${facts.card.title || facts.name}: ${format.loss(status.loss)}`;
  }

  function drawTiles(here) {
    write($("tile-loss"), format.loss(status.loss));
    const aborted = status.rounds_aborted ? `, ${status.rounds_aborted} aborted` : "";
    const undone = status.rounds_undone ? `, ${status.rounds_undone} undone` : "";
    const held = newestHeldOut();
    write($("tile-loss-note"), held ? `in training; held out ${format.loss(held.loss)}, after round ${held.round}` : "in training, of the newest round");
    const speed = here.reduce((sum, one) => sum + one.tokens_per_s, 0);
    write($("tile-speed"), `${format.count(speed)}/s`);
    write($("tile-speed-note"), status.elapsed_s > 1 ? `tokens; ${format.count(status.tokens_committed / status.elapsed_s)}/s over the whole run` : "tokens");
    write($("tile-members"), String(here.length));
    const before = status.members.length - here.length;
    write($("tile-members-note"), before ? `here; ${before} ${before === 1 ? "has" : "have"} been here before` : "here");
    write($("tile-round"), String(status.round));
    const share = status.tokens_in_round / facts.round.tokens;
    bar($("round-bar"), share);
    const closes = status.closes_in_s == null ? "" : `, closes in ${format.duration(status.closes_in_s)}`;
    write($("tile-used"), status.utilisation == null ? "–" : format.percent(status.utilisation));
    write($("tile-used-note"), status.goodput == null ? "of the members' time" : `of the members' time; ${format.percent(status.goodput)} of their tokens count`);
    write($("tile-round-note"), `${format.count(status.tokens_in_round)} of ${format.count(facts.round.tokens)} tokens${closes}`);
    write($("rounds-title"), `Rounds: ${status.rounds_committed} committed${aborted}${undone}`);
    drawAgreement(here);
  }

  const heldOut = () => (status.evaluation ? status.evaluation.figures.filter((one) => one.loss != null) : []);
  const newestHeldOut = () => heldOut().pop();

  function drawAgreement(here) {
    const synced = here.filter((one) => one.synced).length;
    const agreed = status.stages.length ? status.stages.every((one) => one.state_digest) : Boolean(status.state_digest);
    const badge = $("tile-same");
    badge.className = `big ${agreed ? "good" : "dim"}`;
    write(badge, agreed ? "bit-identical" : "not agreed yet");
    const digest = status.state_digest ? ` ${status.state_digest.slice(0, 12)}` : "";
    write($("tile-same-note"), copy ? `state${digest}` : agreed ? `${synced} of ${format.many(here.length, "member")} hold state${digest}` : `${synced} of ${here.length} hold the newest state`);
  }

  function drawOwn() {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("peer") || facts.own_peer;
    const member = wanted && status.members.find((one) => one.peer.startsWith(wanted));
    $("own").hidden = !wanted;
    if (!wanted) return;
    if (!member) { fill($("own"), make("p", `No member ${wanted} is here.`)); return; }
    const words = `${member.alive ? member.activity : `not here${member.left ? `: ${member.left}` : ""}`} · ${format.count(member.tokens_per_s)} tokens/s · `
      + `${format.count(member.tokens_committed)} tokens committed, ${format.percent(member.share)} of the run · `
      + `${format.bytes(member.bytes_sent)} sent, ${format.bytes(member.bytes_received)} received`;
    const trouble = member.wall || member.trouble;
    fill($("own"), make("h2", `${facts.own_peer ? "This peer" : "Your peer"}: ${member.name}`), make("p", words), ...(trouble ? [make("p", trouble, "warn")] : []));
  }

  function drawStages() {
    $("stages-card").hidden = !status.stages.length;
    for (const head of document.querySelectorAll(".staged")) head.hidden = !status.stages.length;
    const most = Math.max(1, ...status.stages.map((one) => one.capacity_tokens_per_s));
    fill($("stages"), ...status.stages.map((stage, number) => {
      const item = make("li", null, stage.outlook ? "empty" : stage.is_bottleneck ? "bottleneck" : "");
      const what = make("div");
      what.append(make("b", `Stage ${number}`), make("div", `layers ${stage.first_layer} to ${stage.stop_layer - 1}, ${format.bytes(stage.parameters_bytes)}`, "dim"));
      const flow = make("div");
      flow.append(track(stage.tokens_per_s / most), make("div", `${format.count(stage.tokens_per_s)} of ${format.count(stage.capacity_tokens_per_s)} tokens/s${stage.is_bottleneck ? ", bottleneck" : ""}`, "dim"));
      const holders = [...stage.replicas.map((peer) => named(peer)), ...stage.coming.map((peer) => `${named(peer)} (coming)`)].join(", ");
      item.append(what, flow, make("div", stage.outlook || (stage.replicas.length === 1 ? `${holders}: one replica, nobody checks it` : holders), stage.outlook ? "warn" : ""));
      return item;
    }));
  }

  function drawMembers() {
    const here = status.members.filter((one) => one.alive);
    const mine = new URLSearchParams(location.hash.slice(1)).get("peer") || facts.own_peer;
    table.set(status.members, status.stages.length > 0, mine);
    write($("members-count"), `${here.length} here, ${status.members.length} in all`);
    $("nobody").hidden = status.members.length > 0;
  }

  function drawBytes() {
    const entries = [["codec", facts.codec]];
    if (rounds && rounds.round.length) {
      const sum = (values) => values.reduce((total, value) => total + value, 0);
      const sent = sum(rounds.sent_bytes);
      entries.push(["sent by all", format.bytes(sent)]);
      const done = rounds.round.map((_, index) => index).filter((index) => rounds.state[index] === "committed" && rounds.members[index] > 1);
      if (done.length) {
        const each = sum(done.map((index) => rounds.sent_bytes[index] / rounds.members[index])) / done.length;
        entries.push(["a member a round", format.bytes(each)]);
        if (facts.elements) {
          const plain = sum(done.map((index) => 8 * facts.elements * (rounds.members[index] - 1)));
          entries.push(["against float32", `1/${(plain / Math.max(1, sum(done.map((index) => rounds.sent_bytes[index])))).toPrecision(3)} of the bytes of an all-reduce in float32`]);
        }
      }
    }
    for (const relay of status.relays) entries.push(["relay", relay.load ? `${format.many(relay.load.links, "connection")}, ${format.bytes(relay.load.carried_bytes)} carried` : "does not answer"]);
    pairs($("bytes"), entries);
    fill($("epochs"), ...status.coverage.slice(-3).map((one) => {
      const line = make("div");
      line.append(make("span", `Epoch ${one.epoch}: ${format.percent(one.committed / one.samples)} of ${format.count(one.samples)} samples committed, each once`), track(one.committed / one.samples));
      return line;
    }));
  }

  // Rounds -------------------------------------------------------------------------------------------------

  let lossChart = null, speedChart = null, strip = null;

  function drawRounds() {
    if (!rounds) return;
    const done = rounds.round.map((_, index) => index).filter((index) => rounds.state[index] === "committed");
    const pick = (name) => done.map((index) => rounds[name][index]);
    const xs = pick(byTime ? "ended_s" : "tokens_total");
    const tables = [[xs, pick("loss")]];
    const held = heldOut();
    tables.push([held.map((one) => (byTime ? one.at_s : one.tokens)), held.map((one) => one.loss)]);
    lossChart.set(byTime, ...tables);
    const spans = done.map((index) => (index ? rounds.ended_s[index] - rounds.ended_s[index - 1] : null));
    const speed = done.map((index, number) => (spans[number] > 0 ? rounds.tokens[index] / spans[number] : null));
    speedChart.set(byTime, [xs, speed, pick("members")]);
    if (chosenRound == null && rounds.round.length) describe(rounds.round.length - 1);
    strip.set(rounds);
    drawBytes();
  }

  let drawnFigures = "";

  // Held-out losses are drawn when there is a new one.
  function drawEvaluations() {
    const figures = status.evaluation ? JSON.stringify(status.evaluation.figures) : "";
    if (figures === drawnFigures) return;
    drawnFigures = figures;
    drawRounds();
  }

  // What is known of a round without asking. Its place has a fixed height, so that nothing below moves.
  function describe(index) {
    const number = rounds.round[index];
    write($("round-detail"), `Round ${number} ${rounds.state[index]} · ${format.time(rounds.ended_s[index])}`);
    const entries = [["loss", format.loss(rounds.loss[index])], ["tokens", format.count(rounds.tokens[index])], ["members", String(rounds.members[index])],
      ["sent", format.bytes(rounds.sent_bytes[index])], ["since the one before", index ? format.duration(rounds.ended_s[index] - rounds.ended_s[index - 1]) : "–"],
      ["parts", rounds.void[index] ? `${rounds.void[index]} of ${rounds.parts[index]} void` : String(rounds.parts[index])]];
    if (rounds.cost[index] != null) entries.push(["cost", format.money(rounds.cost[index], status.costs.currency)]);
    if (rounds.energy_j[index] != null) entries.push(["energy", format.energy(rounds.energy_j[index])]);
    pairs($("round-figures"), entries);
    const spent = [["compute", rounds.work_s[index], "training"], ["waiting", rounds.gather_s[index], "gathering"], ["exchange", rounds.exchange_s[index], "averaging"]];
    const known = spent.filter(([, value]) => value != null).map(([phase, value, words]) => [phase, value, `${words} ${cards.seconds(value)}`]);
    const spans = rounds.phases[index] && cards.PHASES.map((phase, place) => [phase, rounds.phases[index][place]]);
    const account = spans ? spans.map(([phase, value]) => [phase, value, `${phase} ${cards.seconds(value)}`]) : [];
    fill($("round-time"), ...(known.length ? parts(known) : []), ...(spans ? [make("h3", "Its members, by their own account"), ...parts(account)] : []));
    const why = [rounds.reason[index], rounds.why[index]].filter((words) => words).join(" · ");
    write($("round-why"), why || "\u00a0");
    $("round-why").className = rounds.state[index] === "committed" ? "" : "warn";
  }

  async function choose(index) {
    const number = rounds.round[index];
    chosenRound = number;
    describe(index);
    try {
      const detail = copy ? copy.details[number] : await get(at("round.json", `&round=${number}`));
      if (chosenRound !== number || !detail) return;
      const whole = detail.members.reduce((sum, one) => sum + one.weight, 0);
      const chips = detail.members.slice(0, 64).map((one) => make("li", `${named(one.peer)} · ${format.percent(one.weight / whole)}`));
      if (detail.members.length > 64) chips.push(make("li", `and ${detail.members.length - 64} more`));
      for (const [name, value] of Object.entries(detail.amended)) chips.push(make("li", `${name} = ${value}`));
      fill($("round-members"), ...chips);
    } catch (error) {
      fill($("round-members"));
    }
  }

  // Beginning ----------------------------------------------------------------------------------------------

  function drawFacts() {
    write($("title"), facts.card.title || facts.name);
    write($("subtitle"), `${facts.name} · ${facts.recipe}${facts.elements ? `, ${format.count(facts.elements)} parameters` : ""} · ${facts.algorithm}${facts.pipeline ? ", a pipeline" : ""} · ${facts.codec}`);
    const settings = Object.entries(facts.settings).map(([name, value]) => `${name} ${value}`).join(", ");
    const entries = [["for", facts.card.purpose], ["licence", facts.card.licence], ["data", facts.data], ["model", settings],
      ["a round", `${format.count(facts.round.tokens)} tokens, ${format.duration(facts.round.max_s)} at most`], ["contact", facts.card.contact]];
    pairs($("run-facts"), entries.filter(([, text]) => text));
    if (facts.card.homepage) {
      const link = make("a", facts.card.homepage);
      link.href = facts.card.homepage; // https:// only, as the run file is checked
      link.rel = "noreferrer";
      const place = make("dd");
      place.append(link);
      $("run-facts").append(make("dt", "homepage"), place);
    }
    const asked = facts.admission === "open" ? "Anybody may join." : `Joining needs an invite${facts.card.contact ? `; ask ${facts.card.contact}` : ": ask the host for one"}.`;
    fill($("join"), make("p", copy ? `This is a copy of ${format.time(copy.made_s)}${copy.renewed_s ? ", renewed now and then" : ""}; ${status.phase === "ended" ? "the run has ended." : asked}` : asked), ...(copy ? [] : [make("pre", "pip install shoal\nshoal join 'shoal://…'")]));
  }

  async function begin() {
    const runs = copy ? [{ name: copy.facts.name }] : await get("runs.json");
    if (!runs.length) { told("no run is served at the moment"); setTimeout(start, 5000); return; }
    const wanted = new URLSearchParams(location.search).get("run");
    if (runs.length > 1 && !runs.some((one) => one.name === wanted)) { showRuns(runs); return; }
    runName = (runs.find((one) => one.name === wanted) || runs[0]).name;
    $("all-runs").hidden = runs.length < 2;
    facts = copy ? copy.facts : await get(at("run.json"));
    status = copy ? copy.status : null;
    drawFacts();
    if (copy) {
      rounds = copy.rounds;
      if (copy.renewed_s) setTimeout(() => location.reload(), 1000 * copy.renewed_s);
      told("a copy");
      $("link").classList.remove("lost");
      draw();
      drawMembers();
      drawRounds();
    } else {
      follow();
    }
  }

  // The host's runs, with a card each.
  function showRuns(runs) {
    $("one").hidden = true;
    $("all").hidden = false;
    $("phase").hidden = true;
    write($("title"), document.title = "Runs of this host");
    write($("subtitle"), `${format.many(runs.length, "run")}: choose one`);
    cards.runs(runs);
    told("live");
    setTimeout(async () => {
      if (document.hidden) { showRuns(runs); return; }
      try {
        const now = await get("runs.json");
        if (now.length < 2) location.reload(); else showRuns(now);
      } catch (error) {
        told("the host does not answer");
        setTimeout(start, 5000);
      }
    }, 5000);
  }

  async function start() {
    try {
      await begin();
    } catch (error) {
      console.info("the page is begun again later", error);
      told("the host does not answer");
      setTimeout(start, 5000);
    }
  }

  function choseAxis(time) {
    byTime = time;
    $("by-time").setAttribute("aria-pressed", String(time));
    $("by-tokens").setAttribute("aria-pressed", String(!time));
    drawRounds();
  }

  document.addEventListener("DOMContentLoaded", () => {
    lossChart = new charts.Chart($("loss-chart"), [
      { label: "training", colour: "--accent", write: format.loss },
      { label: "held out", colour: "--second", write: format.loss, dash: [6, 4], points: true },
    ]);
    speedChart = new charts.Chart($("speed-chart"), [
      { label: "tokens/s", colour: "--accent", write: format.count, fromZero: true },
      { label: "members", colour: "--second", write: String, scale: "members" },
    ], "members");
    strip = new charts.Strip($("strip"), choose);
    $("by-tokens").onclick = () => choseAxis(false);
    $("by-time").onclick = () => choseAxis(true);
    table = new members.Table($("members-table"), $("more"));
    window.addEventListener("hashchange", () => { if (status && facts) drawSoon(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { lossChart.make(); speedChart.make(); strip.draw(); });
    start();
  });
})();

// Draws a run's state. Everything that comes from the job is text: it is only ever set as textContent or as a number.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = ["forward", "backward", "between", "wait"];
const PART_NAMES = {forward: "forward", backward: "backward", between: "between steps (optimizer, input)", waitfill: "waiting for others", item: "on the wire"};
const CLASS_OF = {forward: "forward", backward: "backward", between: "between", wait: "waitfill"};
const PHASES = {"in forward": "forward", "in backward": "backward", "at the end of backward": "backward", "between steps": "between"};

const find = id => document.getElementById(id);

function make(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const isNumber = value => typeof value === "number" && isFinite(value);
const short = value => typeof value === "string" ? value : !isNumber(value) ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
const ms = seconds => !isNumber(seconds) ? "–" : seconds >= 10 ? `${short(seconds)} s` : `${short(seconds * 1000)} ms`;

function size(bytes) {
  if (!isNumber(bytes) || bytes < 0) return "–";
  if (bytes === 0) return "0";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < 4) { bytes /= 1000; unit += 1; }
  return `${short(bytes)} ${units[unit]}`;
}

function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds)), pad = value => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

function fill(node, ...children) { node.replaceChildren(...children); }

// Charts.

function lines(node, label, curves, width_s, format) {
  const values = curves.flatMap(curve => curve.values).filter(isNumber);
  if (values.length < 2) { fill(node, make("p", "nothing yet", "note")); return; }
  const [W, H, left, bottom, top] = [520, 190, 58, 22, 8];
  const low = Math.min(0, ...values), high = Math.max(...values) || 1, count = Math.max(...curves.map(curve => curve.values.length));
  const x = at => left + (W - left - 6) * (count > 1 ? at / (count - 1) : 0);
  const y = value => top + (H - top - bottom) * (1 - (value - low) / (high - low || 1));
  const last = curves[0].values.filter(isNumber).at(-1);
  const svg = draw("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${label}: now ${format(last)}, at most ${format(high)}`});
  for (const part of [0, 0.5, 1]) {
    const value = low + part * (high - low);
    svg.append(draw("line", {class: "axis", x1: left, x2: W - 6, y1: y(value), y2: y(value)}));
    svg.append(draw("text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, format(value)));
  }
  svg.append(draw("text", {x: left, y: H - 6}, "0:00:00"));
  svg.append(draw("text", {x: W - 6, y: H - 6, "text-anchor": "end"}, clock(count * width_s)));
  for (const [number, curve] of curves.entries()) {
    let path = "";
    curve.values.forEach((value, at) => { if (isNumber(value)) path += `${path ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`; });
    const line = draw("path", {class: `curve c${number % 5}`, d: path});
    line.append(draw("title", {}, curve.name));
    svg.append(line);
  }
  fill(node, svg);
}

function timeline(node, rows, workers) {
  if (!rows.length) { fill(node, make("p", "nothing yet", "note")); return; }
  const starts = rows.flatMap(row => row.spans.map(span => span[2])), ends = rows.flatMap(row => row.spans.map(span => span[3]));
  const [W, left, height] = [1100, 120, 46], from = Math.min(...starts), until = Math.max(...ends), H = rows.length * height + 26;
  const x = at => left + (W - left - 8) * (at - from) / (until - from || 1);
  const svg = draw("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `Timeline of ${ms(until - from)} on ${rows.length} workers; the table of workers below has the same figures`});
  const hatch = draw("pattern", {id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"});
  hatch.append(draw("rect", {width: 2.5, height: 6, class: "waitfill"}));
  const definitions = draw("defs", {});
  definitions.append(hatch);
  svg.append(definitions);
  rows.forEach((row, number) => {
    const top = number * height + 4, worker = workers.find(one => one.rank === row.rank);
    svg.append(draw("text", {x: 4, y: top + 17}, `${row.rank} ${worker ? worker.host : ""}`.slice(0, 18)));
    svg.append(draw("line", {class: "axis", x1: 0, x2: W, y1: top + height - 6, y2: top + height - 6}));
    const lanes = [];
    const order = {phase: 0, wait: 1, item: 2};  // waits lie on the phases that they are part of
    for (const [kind, name, begin, end] of [...row.spans].sort((a, b) => order[a[0]] - order[b[0]] || a[2] - b[2])) {
      const wide = Math.max(0.8, x(end) - x(begin)), place = {x: x(begin).toFixed(1), width: wide.toFixed(1)};
      let box;
      if (kind === "phase" && PHASES[name]) box = draw("rect", {...place, y: top, height: 15, class: PHASES[name]});
      else if (kind === "wait") {
        svg.append(draw("rect", {...place, y: top, height: 15, class: "gap"}));
        box = draw("rect", {...place, y: top, height: 15, fill: "url(#hatch)"});
      }
      else if (kind === "item") {
        let lane = lanes.findIndex(free => free <= begin);
        if (lane < 0) lane = lanes.length < 4 ? lanes.length : 3;
        lanes[lane] = end;
        box = draw("rect", {...place, y: top + 18 + lane * 5, height: 4, class: "item"});
      }
      if (box) { box.append(draw("title", {}, `${name}: ${ms(end - begin)}`)); svg.append(box); }
    }
  });
  svg.append(draw("text", {x: left, y: H - 6}, "0"), draw("text", {x: W - 8, y: H - 6, "text-anchor": "end"}, ms(until - from)));
  fill(node, svg);
}

function bar(parts, most) {
  const svg = draw("svg", {viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true"});
  let at = 0;
  for (const [kind, value] of parts) {
    const wide = most > 0 ? 100 * value / most : 0;
    svg.append(draw("rect", {x: at.toFixed(2), y: 0, width: Math.max(0, wide).toFixed(2), height: 10, class: kind}));
    at += wide;
  }
  return svg;
}

// Tables.

function table(node, caption, titles, rows) {
  const head = make("tr");
  for (const [text, classes] of titles) { const cell = make("th", text, classes); cell.scope = "col"; head.append(cell); }
  const top = make("thead");
  top.append(head);
  const body = make("tbody");
  body.append(...rows);
  fill(node, top, body);
  node.setAttribute("aria-label", caption);
}

function row(cells, classes) {
  const made = make("tr", undefined, classes);
  for (const [content, kind] of cells) {
    const cell = make("td", undefined, kind);
    if (content instanceof Element) cell.append(content); else cell.textContent = content;
    made.append(cell);
  }
  return made;
}

const queue = one => one.queued ? `${one.queued}, ${size(one.queued_bytes)}` : one.unsent_bytes ? size(one.unsent_bytes) : "0";

function showWorkers(state) {
  const most = Math.max(0, ...state.workers.map(one => one.step_s)), hasDevice = state.workers.some(one => one.device_bytes > 0);
  const rows = state.workers.map(one => {
    const parts = PARTS.map(part => [CLASS_OF[part], one[`${part}_s`]]);
    const doing = one.silent_s > 3 && state.is_running ? `silent for ${short(one.silent_s)} s` : one.waits_for ? `waits for ${one.waits_for}` : one.where && one.doing_s > 2 ? `${one.doing}, ${one.where}` : one.doing;
    return row([[`${one.rank} ${one.host}`, "text"], [String(one.step)], [bar(parts, most), "bar"], [ms(one.forward_s)], [ms(one.backward_s)], [ms(one.between_s)], [ms(one.wait_s)],
      [`${short(one.waited_s)} s`], [short(one.cpu)], [queue(one)], [size(one.memory_bytes)], ...(hasDevice ? [[size(one.device_bytes)]] : []), [doing, "text"]], one.rank === state.verdict.rank ? "named" : "");
  });
  table(find("workers"), "Workers: where the time of a step goes", [["worker", "text"], ["step"], ["a step"], ["forward"], ["backward"], ["between"], ["waits"], ["waited in all"], ["cores used"], ["queued"], ["memory"], ...(hasDevice ? [["GPU memory"]] : []), ["now", "text"]], rows);
}

function showLinks(state) {
  const hosts = [...new Set(state.links.flatMap(link => [link.from, link.to]))].sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
  if (!hosts.length) { fill(find("links"), make("caption", "no bytes between machines yet", "note")); return; }
  const by = new Map(state.links.map(link => [JSON.stringify([link.from, link.to]), link]));
  const rows = hosts.map(from => row([[from, "text"], ...hosts.map(to => {
    const link = by.get(JSON.stringify([from, to]));
    return [link ? `${size(link.bytes)}${link.mbit_per_s ? `, ${short(link.mbit_per_s)} Mbit/s` : ""}${link.resent_bytes > 0.002 * link.bytes ? `, ${short(100 * link.resent_bytes / link.bytes)} % again` : ""}` : "", "heat"];
  })]));
  table(find("links"), "Bytes from each machine, in rows, to each, in columns; the rate is that while in use", [["from \\ to", "text"], ...hosts.map(host => [host])], rows);
}

function showRoutes(state) {
  const routes = state.routes || [], most = Math.max(0, ...routes.map(one => one.bytes));
  if (!routes.length) { fill(find("routes"), make("caption", "no bytes yet", "note")); return; }
  table(find("routes"), "Bytes that all workers sent, by route", [["route", "text"], ["in all"], ["a step"], ["share"]],
    routes.map(one => row([[one.route, "text"], [size(one.bytes)], [size(one.step_bytes)], [bar([["item", one.bytes]], most), "bar"]])));
}

function showPlan(state) {
  const items = state.plan.items || [];
  find("plan-note").textContent = items.length ? `${state.plan.name}, since step ${state.plan.step}. Predicted: time on the wire alone. Measured: from leaving to being taken, which includes what was hidden behind backward and waits for slower workers.` : "no plan yet";
  const most = Math.max(0, ...items.map(item => Math.max(item.predicted_s, item.measured_s || 0)));
  table(find("plan"), "The plan: items with their routes and times", [["item", "text"], ["route", "text"], ["bytes"], ["predicted"], ["measured"], ["both"]], items.map(item => {
    const both = make("span");
    both.append(bar([["item", item.predicted_s]], most), bar([["backward", item.measured_s || 0]], most));
    return row([[item.name, "text"], [item.route, "text"], [size(item.bytes)], [ms(item.predicted_s)], [ms(item.measured_s)], [both, "bar"]]);
  }));
}

function showEvents(events) {
  const list = events.slice(-200).reverse().map(event => {
    const {at, event: kind, ...rest} = event, made = make("li"), when = new Date(1000 * at);
    const time = make("time", when.toLocaleTimeString());
    time.dateTime = isNaN(when) ? "" : when.toISOString();
    const words = rest.text || Object.entries(rest).map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(" · ") : value}`).join(", ");
    made.append(time, make("strong", kind), document.createTextNode(` ${words}`));
    return made;
  });
  fill(find("events"), ...list);
}

function show(data) {
  const {state, events, summary} = data;
  if (!state || !state.history) return;
  document.title = `${state.command} - Poseidon`;
  find("command").textContent = state.command;
  const badge = find("badge"), isOver = summary && "status" in summary;
  badge.textContent = isOver ? (summary.status ? `ended with status ${summary.status}` : "ended well") : data.is_stale ? "no news from the launcher" : state.restart ? `running, restart ${state.restart}` : "running";
  badge.className = `badge ${isOver ? (summary.status ? "bad" : "good") : data.is_stale ? "bad" : "live"}`;
  const verdict = find("verdict"), doubt = state.verdict.is_sure || ["starting", "unclear"].includes(state.verdict.cause) ? "" : "probably ";
  // Of a job that has ended, the last verdict is about the time before.
  const before = isOver && summary.cause ? `${summary.cause}. Before it ended: ` : isOver ? "Before it ended: " : "";
  const text = `${before}${doubt}${state.verdict.text}${state.verdict.next_step && !isOver ? `: ${state.verdict.next_step}` : ""}`;
  if (verdict.textContent !== text) verdict.textContent = text;
  verdict.className = `verdict ${state.verdict.cause === "computation" ? "even" : state.verdict.is_sure ? "sure" : ""}`;
  const figures = [["steps/s", short(isOver ? summary.steps_per_s : state.steps_per_s)], ["samples/s", short(isOver ? summary.samples_per_s : state.samples_per_s)], ["loss", short(state.loss)],
    ["step", short(Math.max(0, ...state.workers.map(one => one.step)))], ["workers", String(state.workers.length)], ["running for", clock(state.elapsed_s)]];
  if (!isOver && isNumber(state.left_s)) figures.push([state.left_of ? `left in ${state.left_of}` : "left", clock(state.left_s)]);
  fill(find("figures"), ...figures.map(([name, value]) => { const pair = make("div"); pair.append(make("dt", name), make("dd", value)); return pair; }));
  const past = state.history;
  const done = past.steps.length - (isOver ? 0 : 1);  // the last point is still being filled
  lines(find("speed"), "Steps per second", [{name: "steps/s", values: past.steps.slice(0, done).map(steps => steps / past.width_s)}], past.width_s, short);
  lines(find("loss"), "Loss", [{name: "loss", values: past.loss}], past.width_s, short);
  lines(find("memory"), "Memory", past.memory_bytes.map((values, rank) => ({name: `worker ${rank}`, values: values.map(bytes => bytes || null)})), past.width_s, size);
  timeline(find("timeline"), state.timeline, state.workers);
  find("h-step").textContent = state.timeline.length ? `Step ${state.timeline[0].step}` : "One step";
  showWorkers(state);
  showLinks(state);
  showRoutes(state);
  showPlan(state);
  showEvents(events);
  find("trace").hidden = !data.has_trace;
  const which = find("which"), logs = ["launcher", ...data.logs.map(String)], chosen = which.value;
  if (which.options.length !== logs.length) {
    fill(which, ...logs.map(name => { const option = make("option", name === "launcher" ? name : `worker ${name}`); option.value = name; return option; }));
    if (logs.includes(chosen)) which.value = chosen;
    showLog();
  }
}

async function showLog() {
  const answer = await fetch(`log?of=${encodeURIComponent(find("which").value || "launcher")}`);
  if (!answer.ok) return;
  const pre = find("log"), isAtEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
  pre.textContent = await answer.text();
  if (isAtEnd) pre.scrollTop = pre.scrollHeight;
}

function legend() {
  fill(find("legend"), ...Object.entries(PART_NAMES).map(([kind, name]) => {
    const made = make("li"), svg = draw("svg", {viewBox: "0 0 10 10", "aria-hidden": "true"});
    svg.append(draw("rect", {width: 10, height: 10, class: kind}));
    made.append(svg, document.createTextNode(name));
    return made;
  }));
}

legend();
find("which").addEventListener("change", showLog);
const stream = new EventSource("stream");
stream.onmessage = message => show(JSON.parse(message.data));
stream.onerror = () => { const badge = find("badge"); if (!badge.textContent.startsWith("ended")) { badge.textContent = "no connection"; badge.className = "badge bad"; } };
setInterval(() => { if (!document.hidden) showLog(); }, 3000);

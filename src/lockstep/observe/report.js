"use strict";
(async () => {
const byId = id => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const ints = async text => {                        // of 32 bits, packed by zlib
  const packed = new Blob([Uint8Array.from(atob(text), c => c.charCodeAt(0))]);
  return new Int32Array(await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
};
const unpacked = async each => {
  const found = {...each};
  for (const name of ["start", "length", "kind", "text", "steps"]) found[name] = await ints(each[name]);
  return found;
};
const ranks = await Promise.all(data.ranks.map(unpacked));
const steps = {};
for (const name in data.steps) steps[name] = await ints(data.steps[name]);
const unit = data.unit, end = data.end, names = data.names;   // microseconds of one count; counts in all
const root = document.documentElement, canvas = byId("timeline"), frame = byId("frame"), tip = byId("tip");
const color = name => getComputedStyle(root).getPropertyValue("--" + name).trim();
const skipped = steps.length.length > 2 ? 1 : 0;    // the first step is like no other
const WAIT = data.labels.indexOf("wait"), BUCKET = data.labels.indexOf("bucket"), REDUCE = data.labels.indexOf("all-reduce");

function digits(number) { const size = Math.abs(number); return number.toLocaleString("en", size < 9.995 ? {minimumFractionDigits: 2, maximumFractionDigits: 2} : size < 99.95 ? {minimumFractionDigits: 1, maximumFractionDigits: 1} : {maximumFractionDigits: 0}); }
function time(counts) {
  const us = counts * unit;
  return us === 0 ? "0 ms" : Math.abs(us) >= 999500 ? digits(us / 1e6) + " s" : Math.abs(us) >= 999.5 ? digits(us / 1e3) + " ms" : digits(us) + " µs";
}
function above(list, value) {                       // the number of those that are at most this
  let low = 0, high = list.length;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] <= value) low = middle + 1; else high = middle; }
  return low;
}
function firstEndingAfter(rank, at) {               // spans are sorted by their starts
  let low = 0, high = rank.start.length;
  while (low < high) { const middle = (low + high) >> 1; if (rank.start[middle] + rank.longest < at) low = middle + 1; else high = middle; }
  return low;
}
const kindOf = (rank, i) => rank.kind[i] & 15, laneOf = (rank, i) => rank.kind[i] >> 4;
const textOf = (rank, i) => names[rank.text[i]];
const labelOf = (rank, i) => data.labels[kindOf(rank, i)] + (textOf(rank, i) ? ": " + textOf(rank, i) : "");
const stepAt = at => { const i = above(steps.start, at) - 1; return i >= 0 && at <= steps.stop[i] ? i : -1; };

function size(target, height) {
  const scale = window.devicePixelRatio || 1, width = target.clientWidth;
  target.width = width * scale; target.height = height * scale; target.style.height = height + "px";
  const context = target.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0); context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif"; context.textBaseline = "middle";
  return [context, width];
}

// Fills: a colour for each kind, and a pattern for what costs time, as in the style sheet.
let fills = [], plain = [], inks = [];
function mixed(one, other, part) { const rgb = text => [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16)); const a = rgb(one), b = rgb(other); return "#" + a.map((v, i) => Math.round(v * part + b[i] * (1 - part)).toString(16).padStart(2, "0")).join(""); }
function full(text) { return text.length === 4 ? "#" + [...text.slice(1)].map(c => c + c).join("") : text; }
function prepareFills(context) {
  const back = full(color("back"));
  plain = data.kinds.map(kind => full(color(kind)));
  inks = plain.map(text => { const [r, g, b] = [1, 3, 5].map(i => (parseInt(text.slice(i, i + 2), 16) / 255) ** 2.2); return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#000" : "#fff"; });
  fills = data.kinds.map((kind, i) => {
    const tile = document.createElement("canvas"), on = tile.getContext("2d");
    tile.width = tile.height = 8;
    on.fillStyle = plain[i]; on.fillRect(0, 0, 8, 8);
    on.strokeStyle = on.fillStyle = mixed(plain[i], back, 0.7); on.lineWidth = 2;
    const lines = {data: [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]], wait: [[-2, 6, 2, 10], [-2, -2, 10, 10], [6, -2, 10, 2]], reduce: [[2, 0, 2, 8], [6, 0, 6, 8]], evaluation: [[0, 2, 8, 2], [0, 6, 8, 6]]}[kind];
    for (const [a, b, c, d] of lines || []) { on.beginPath(); on.moveTo(a, b); on.lineTo(c, d); on.stroke(); }
    if (kind === "collectives") { on.fillRect(1, 1, 2, 2); on.fillRect(5, 5, 2, 2); }
    return lines || kind === "collectives" ? context.createPattern(tile, "repeat") : plain[i];
  });
}

// The timeline.
const LANE = 18, HEAD = 20, GAP = 12, AXIS = 40;
const heightOf = rank => HEAD + rank.lanes * LANE + GAP;
const tops = []; let total = 0;
for (const rank of ranks) { tops.push(total); total += heightOf(rank); }
let from = skipped ? steps.start[1] : 0, to = end, chosen = null, found = null, hovered = null;

function axis(context, width, scale) {
  const ink = color("ink"), soft = color("soft"), line = color("line");
  context.fillStyle = color("panel"); context.fillRect(0, 0, width, AXIS);
  const least = 90 / scale * unit, power = 10 ** Math.floor(Math.log10(least)), tick = [1, 2, 5, 10].find(n => n * power >= least) * power;
  const [factor, name] = to * unit >= 2e6 ? [1e6, "s"] : to * unit >= 2e3 ? [1e3, "ms"] : [1, "µs"];
  const decimals = Math.max(0, -Math.floor(Math.log10(tick / factor) + 1e-9));
  context.textAlign = "center";
  for (let at = Math.ceil(from * unit / tick); at * tick < to * unit; at++) {
    const x = (at * tick / unit - from) * scale;
    context.fillStyle = soft; if (x > 24 && x < width - 24) context.fillText((at * tick / factor).toLocaleString("en", {minimumFractionDigits: decimals, maximumFractionDigits: decimals}) + " " + name, x, 10);
    context.fillRect(x, 17, 1, 4);
  }
  let until = -1;
  for (let i = Math.max(0, above(steps.stop, from)); i < steps.start.length && steps.start[i] < to; i++) {
    const left = Math.max(0, (steps.start[i] - from) * scale), right = Math.min(width, (steps.stop[i] - from) * scale);
    if (right - left > 5) { context.fillStyle = line; context.fillRect(left, 22, 1, context.canvas.height); }
    const text = right - left > 58 ? "step " + steps.number[i] : "" + steps.number[i];
    const middle = (left + right) / 2, half = context.measureText(text).width / 2 + 3;
    if (right - left > 2 * half - 4 && middle - half > until) { context.fillStyle = ink; context.fillText(text, middle, 30); until = middle + half; }
  }
  context.textAlign = "left";
}
function draw() {
  const height = Math.min(AXIS + total, Math.max(200, Math.round(innerHeight * 0.75)));
  frame.style.maxHeight = height + "px"; byId("spacer").style.height = Math.max(0, AXIS + total - height) + "px";
  const [context, width] = size(canvas, height);
  const scale = width / (to - from), shift = AXIS - frame.scrollTop, ink = color("ink");
  if (context.canvas !== draw.last || draw.theme !== root.className) { prepareFills(context); draw.theme = root.className; draw.last = context.canvas; }
  axis(context, width, scale);
  context.save(); context.beginPath(); context.rect(0, AXIS, width, height); context.clip();
  ranks.forEach((rank, r) => {
    const top = tops[r] + shift;
    if (top > height || top + heightOf(rank) < AXIS) return;
    const drawn = new Int32Array(rank.lanes).fill(-1);
    for (let i = firstEndingAfter(rank, from); i < rank.start.length && rank.start[i] < to; i++) {
      const right = (rank.start[i] + rank.length[i] - from) * scale;
      if (right < 0) continue;
      const left = Math.max(-1, (rank.start[i] - from) * scale), lane = laneOf(rank, i), kind = kindOf(rank, i);
      if (right < drawn[lane] + 0.4 && right - left < 1) continue;   // nothing that could be seen
      const wide = Math.min(right, width + 1) - left, y = top + HEAD + lane * LANE;
      context.globalAlpha = found && !isFound(rank, i) ? 0.18 : 1;
      context.fillStyle = wide > 4 ? fills[kind] : plain[kind];
      const inset = kind === REDUCE ? 4 : 0;
      context.fillRect(left, y + inset, Math.max(wide, 0.6), LANE - 2 - inset);
      if (wide > 30) {
        const room = wide - 8, x = Math.max(left, 0) + 4;
        let text = kind === REDUCE || kind === BUCKET ? textOf(rank, i) : labelOf(rank, i);
        if (kind === BUCKET && wide > 60) text = "";            // its all-reduce lies upon it
        if (text && context.measureText(text).width > room) text = fitted(context, text, room);
        if (text) { context.fillStyle = plain[kind]; context.fillRect(x - 2, y + 2 + inset / 2, context.measureText(text).width + 4, LANE - 5 - inset / 2); context.fillStyle = inks[kind]; context.fillText(text, x, y + LANE / 2 - 0.5 + inset / 2); }
      }
      if (chosen && chosen[0] === r && chosen[1] === i) { context.globalAlpha = 1; context.strokeStyle = ink; context.lineWidth = 2; context.strokeRect(left + 1, y + 1, Math.max(wide - 2, 1), LANE - 4); }
      drawn[lane] = Math.max(drawn[lane], right);
    }
    context.globalAlpha = 1; context.fillStyle = ink; context.font = "600 12px system-ui, sans-serif"; context.fillText(rank.name, 4, top + 10); context.font = "12px system-ui, sans-serif";
  });
  links(context, width, scale, shift);
  context.restore();
  byId("range").textContent = time(from) + " to " + time(to);
}
function fitted(context, text, room) {
  if (room < 24) return "";
  let low = 0, high = text.length;
  while (low < high) { const middle = (low + high + 1) >> 1; if (context.measureText(text.slice(0, middle) + "…").width <= room) low = middle; else high = middle - 1; }
  return low > 2 ? text.slice(0, low) + "…" : "";
}

// Meetings: the n-th wait of a step on one rank belongs to the n-th of every other.
function waitsOf(rank, step) {
  const list = [];
  if (step < 0 || !steps.matched[step]) return list;
  const start = rank.steps[2 * step], stop = rank.steps[2 * step + 1];
  for (let i = firstEndingAfter(rank, start); i < rank.start.length && rank.start[i] < stop; i++) if (rank.start[i] >= start && kindOf(rank, i) === WAIT) list.push(i);
  return list;
}
function meetingOf(r, i) {                          // of each rank its wait, and who came last
  if (kindOf(ranks[r], i) !== WAIT) return null;
  const rank = ranks[r];
  let step = -1;
  for (let low = 0, high = steps.start.length - 1; low <= high;) { const middle = (low + high) >> 1; if (rank.steps[2 * middle] > rank.start[i]) high = middle - 1; else if (rank.steps[2 * middle + 1] <= rank.start[i]) low = middle + 1; else { step = middle; break; } }
  const at = waitsOf(rank, step).indexOf(i);
  return at < 0 ? null : meeting(ranks.map(other => waitsOf(other, step)[at]));
}
function meeting(waits) {
  if (ranks.length < 2 || waits.includes(undefined)) return null;
  let last = 0;
  waits.forEach((wait, r) => { if (ranks[r].start[wait] > ranks[last].start[waits[last]]) last = r; });
  return {waits, last, came: ranks[last].start[waits[last]]};
}
function links(context, width, scale, shift) {
  const first = above(steps.stop, from), after = above(steps.start, to);
  const all = [];
  if (after - first <= 3) for (let step = Math.max(0, first); step < after; step++) {
    const lists = ranks.map(rank => waitsOf(rank, step));
    if (lists[0].length <= 40) lists[0].forEach((_, n) => all.push(meeting(lists.map(list => list[n]))));
  }
  const picked = chosen && meetingOf(...chosen);
  for (const each of [...all, picked]) {
    if (!each) continue;
    const x = (each.came - from) * scale;
    if (x < 0 || x > width) continue;
    const yOf = r => tops[r] + shift + HEAD + 1.5 * LANE - 1;
    const waiting = each.waits.map((wait, r) => r).filter(r => r !== each.last && (each.came - ranks[r].start[each.waits[r]]) * scale > 3);
    const bold = each === picked, y = yOf(each.last);
    context.strokeStyle = context.fillStyle = color("ink"); context.lineWidth = bold ? 2 : 1; context.globalAlpha = bold ? 1 : 0.55; context.setLineDash(bold ? [] : [4, 3]);
    for (const r of bold ? each.waits.keys() : waiting) { context.beginPath(); context.moveTo(x, y); context.lineTo(x, yOf(r)); context.stroke(); }
    context.setLineDash([]);
    if (bold || waiting.length) { context.beginPath(); context.arc(x, y, bold ? 5 : 3.5, 0, 7); context.fill(); }
  }
  context.globalAlpha = 1;
}
function told(r, i) {
  const rank = ranks[r], step = stepAt(rank.start[i]), words = [rank.name, labelOf(rank, i), time(rank.length[i])];
  if (step >= 0) words.push("step " + steps.number[step] + ", " + time(rank.start[i] - steps.start[step]) + " into it");
  const met = meetingOf(r, i);
  if (met) { const waited = met.came - rank.start[i]; words.push(met.last === r ? "the last rank to come" : "waits " + time(Math.min(waited, rank.length[i])) + " for " + ranks[met.last].name); }
  return words.join(" · ");
}

// Moving about.
function show(left, right) {
  const length = Math.min(end, Math.max(right - left, 20));
  from = Math.max(0, Math.min(left, end - length)); to = from + length; draw();
}
function zoom(factor, at = 0.5) { const length = (to - from) * factor, middle = from + (to - from) * at; show(middle - length * at, middle + length * (1 - at)); }
function showStep(i) {
  if (i < 0 || i >= steps.start.length) return;
  const edge = (steps.stop[i] - steps.start[i]) * 0.02;
  show(steps.start[i] - edge, steps.stop[i] + edge);
  byId("under").textContent = "step " + steps.number[i] + " takes " + time(steps.length[i]) + ", " + time(steps.waiting[i]) + " of it waiting, as means over the ranks";
}
const middleStep = () => Math.max(0, above(steps.start, (from + to) / 2) - 1);
const isOneStep = () => to - from <= 1.1 * (steps.stop[middleStep()] - steps.start[middleStep()]);
const actions = {
  in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, end),
  left: () => show(from - (to - from) / 3, to - (to - from) / 3), right: () => show(from + (to - from) / 3, to + (to - from) / 3),
  before: () => showStep(isOneStep() ? middleStep() - 1 : middleStep()), next: () => showStep(isOneStep() ? middleStep() + 1 : middleStep()),
};
for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => actions[button.dataset.do]());
canvas.addEventListener("keydown", event => {
  const name = {"+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all", n: "next", p: "before"}[event.key];
  if (name && !event.ctrlKey && !event.metaKey) { event.preventDefault(); actions[name](); }
});
canvas.addEventListener("wheel", event => {          // without a key it scrolls the page
  if (!(event.ctrlKey || event.metaKey || event.altKey)) return;
  event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / canvas.clientWidth);
}, {passive: false});
frame.addEventListener("scroll", draw);
function hit(event) {
  const at = from + event.offsetX * (to - from) / canvas.clientWidth, y = event.offsetY - AXIS + frame.scrollTop, near = 2 * (to - from) / canvas.clientWidth;
  if (event.offsetY < AXIS) return null;
  for (let r = 0; r < ranks.length; r++) {
    const rank = ranks[r], lane = Math.floor((y - tops[r] - HEAD) / LANE);
    if (lane < 0 || lane >= rank.lanes) continue;
    let best = null;
    for (let i = firstEndingAfter(rank, at - near); i < rank.start.length && rank.start[i] <= at + near; i++)
      if (laneOf(rank, i) === lane && rank.start[i] + rank.length[i] >= at - near && (best === null || rank.length[i] <= rank.length[best])) best = i;
    return best === null ? null : [r, best];
  }
  return null;
}
let dragged = null, moved = 0;
canvas.addEventListener("pointerdown", event => { dragged = event.offsetX; moved = 0; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", event => {
  dragged = null;
  if (moved > 4) return;
  if (event.offsetY < AXIS) { showStep(stepAt(from + event.offsetX * (to - from) / canvas.clientWidth)); return; }
  chosen = hit(event); draw();
  byId("under").textContent = chosen ? told(...chosen) : "\u00a0";
});
canvas.addEventListener("pointercancel", () => { dragged = null; });
canvas.addEventListener("dblclick", event => showStep(stepAt(from + event.offsetX * (to - from) / canvas.clientWidth)));
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("pointermove", event => {
  if (dragged !== null) {
    const perPixel = (to - from) / canvas.clientWidth, by = (event.offsetX - dragged) * perPixel;
    moved += Math.abs(event.offsetX - dragged); dragged = event.offsetX; tip.hidden = true;
    if (moved > 4) show(from - by, to - by);
    return;
  }
  hovered = hit(event); tip.hidden = !hovered;
  canvas.style.cursor = event.offsetY < AXIS || hovered ? "pointer" : "grab";
  if (!hovered) return;
  tip.textContent = told(...hovered);
  const room = canvas.clientWidth - tip.offsetWidth - 4, below = event.offsetY + 18;
  tip.style.left = Math.max(0, Math.min(room, event.offsetX + 12)) + "px";
  tip.style.top = (below + tip.offsetHeight > canvas.clientHeight ? event.offsetY - tip.offsetHeight - 8 : below) + "px";
});

// Searching: kinds, operations, loaders and gradients by a part of their names, or a step.
let matches = new Map(), list = [], place = -1;
function isFound(rank, i) {
  const key = kindOf(rank, i) + 16 * rank.text[i];
  let is = matches.get(key);
  if (is === undefined) matches.set(key, is = labelOf(rank, i).toLowerCase().includes(found));
  return is;
}
function search() {
  const text = byId("search").value.trim().toLowerCase(), number = /^step (\d+)$/.exec(text);
  matches = new Map(); list = []; place = -1; found = text && !number ? text : null;
  if (found) ranks.forEach((rank, r) => { for (let i = 0; i < rank.start.length; i++) if (isFound(rank, i)) list.push([r, i]); });
  list.sort((a, b) => ranks[a[0]].start[a[1]] - ranks[b[0]].start[b[1]]);
  byId("found").textContent = found ? list.length.toLocaleString("en") + " found" : "";
  if (number) showStep(steps.number.indexOf(+number[1])); else draw();
}
function go(by) {
  if (!list.length) return;
  if (place < 0) place = by > 0 ? list.findIndex(([r, i]) => ranks[r].start[i] >= from) - 1 : list.length;
  place = (place + by + list.length) % list.length; chosen = list[place];
  const [r, i] = chosen, rank = ranks[r], middle = rank.start[i] + rank.length[i] / 2, length = Math.min(to - from, Math.max(20 * rank.length[i], 200));
  frame.scrollTop = Math.max(0, tops[r] - 40); show(middle - length / 2, middle + length / 2);
  byId("found").textContent = (place + 1).toLocaleString("en") + " of " + list.length.toLocaleString("en");
  byId("under").textContent = told(...chosen);
}
byId("search").addEventListener("input", search);
byId("search").addEventListener("keydown", event => { if (event.key === "Enter") { event.preventDefault(); go(event.shiftKey ? -1 : 1); } });

// Charts over steps.
function drawSteps() {
  const target = byId("steps"), [context, width] = size(target, 170), n = steps.length.length - skipped;
  const lengths = steps.length.subarray(skipped), counted = lengths.filter((_, i) => !steps.profiled[skipped + i]);
  const most = (counted.length ? counted : lengths).reduce((a, b) => Math.max(a, b), 1), bars = Math.min(n, Math.floor(width)), bar = width / bars, gap = bar > 4 ? 1 : 0;
  for (let x = 0; x < bars; x++) {
    const first = skipped + Math.floor(x * n / bars), last = Math.max(first + 1, skipped + Math.floor((x + 1) * n / bars));
    let longest = first;
    for (let i = first; i < last; i++) if (steps.length[i] > steps.length[longest]) longest = i;
    const isCut = steps.length[longest] > most, height = isCut ? 150 : 130 * steps.length[longest] / most, waiting = isCut ? 0 : 130 * steps.waiting[longest] / most;
    context.fillStyle = color(steps.profiled[longest] ? "other" : "forward"); context.fillRect(x * bar, 150 - height + waiting, bar - gap, height - waiting);
    context.fillStyle = bar > 4 ? fills[WAIT] : color("wait"); context.fillRect(x * bar, 150 - height, bar - gap, waiting);
  }
  const soft = color("soft"), mean = 150 - 130 * data.mean / most;
  context.strokeStyle = color("ink"); context.setLineDash([5, 4]); context.beginPath(); context.moveTo(0, mean); context.lineTo(width, mean); context.stroke(); context.setLineDash([]);
  label(context, "mean " + time(data.mean), 4, mean - 9); label(context, "longest " + time(most), 4, 9);
  context.fillStyle = soft; context.fillText("step " + steps.number[skipped], 4, 161); context.textAlign = "right"; context.fillText("step " + steps.number[steps.number.length - 1], width - 4, 161); context.textAlign = "left";
}
function label(context, text, x, y) { context.fillStyle = color("panel"); context.fillRect(x - 2, y - 8, context.measureText(text).width + 4, 16); context.fillStyle = color("ink"); context.fillText(text, x, y); }
byId("steps").addEventListener("click", event => {
  const n = steps.length.length - skipped;
  showStep(skipped + Math.min(n - 1, Math.floor(event.offsetX * n / event.target.clientWidth)));
  frame.scrollIntoView({block: "center"});
});
const COLORS = ["forward", "data", "optimizer", "wait", "transfer", "collectives", "save", "ideal"], DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
function drawLines(target, lines) {                 // each a list of [step, value]
  const [context, width] = size(target, 170), all = lines.flat(), least = (values, start) => values.reduce((a, b) => Math.min(a, b), start);
  const low = least(all.map(p => p[1]), Infinity), high = -least(all.map(p => -p[1]), Infinity);
  const first = least(all.map(p => p[0]), Infinity), last = -least(all.map(p => -p[0]), Infinity);
  lines.forEach((points, i) => {
    context.strokeStyle = color(COLORS[i % COLORS.length]); context.lineWidth = 1.5; context.setLineDash(DASHES[Math.floor(i / 2) % DASHES.length]); context.beginPath();
    for (const [step, value] of points) context.lineTo((step - first) * width / Math.max(1, last - first), 145 - 120 * (value - low) / (high - low || 1));
    context.stroke();
  });
  context.setLineDash([]); context.fillStyle = color("soft");
  label(context, value(high), 4, 10); label(context, value(low), 4, 145);
  context.fillStyle = color("soft"); context.fillText("step " + first, 4, 161); context.textAlign = "right"; context.fillText("step " + last, width - 4, 161); context.textAlign = "left";
}
const value = number => Math.abs(number) >= 1e6 || (number && Math.abs(number) < 1e-3) ? number.toPrecision(3) : (+number.toPrecision(4)).toLocaleString("en", {maximumFractionDigits: 6});
function drawCurves() {
  for (const target of document.querySelectorAll("canvas.logged")) drawLines(target, [data.logged[target.dataset.name]]);
  for (const target of document.querySelectorAll("canvas.curves")) drawLines(target, Object.values(data.curves[target.dataset.index]));
}
function addLegend(list, label, name) {
  const item = document.createElement("li"), box = document.createElement("span");
  box.className = "chip k-" + name; item.append(box, label); list.append(item);
}
const there = new Set(ranks.flatMap(rank => [...new Set(rank.kind.map(kind => kind & 15))]));
for (const [index, label] of data.labels.entries()) if (there.has(index)) addLegend(byId("legend"), label, data.kinds[index]);
for (const target of document.querySelectorAll("canvas.curves"))
  Object.keys(data.curves[target.dataset.index]).forEach((label, i) => addLegend(target.nextElementSibling, label, COLORS[i % COLORS.length]));
const drawAll = () => { draw(); drawSteps(); drawCurves(); };
byId("theme").addEventListener("click", () => { root.classList.toggle("dark"); drawAll(); });
if (matchMedia("(prefers-color-scheme: dark)").matches) root.classList.add("dark");
addEventListener("resize", drawAll);
drawAll();
root.dataset.ready = "yes";
})();

"use strict";
// The batch, the queue and the blocks, as both pages show them: numbers, ids and states of the
// server, set as text.
const FAST_MS = 1000, SLOW_MS = 2000, SPAN_S = 60, LANES = 24, QUEUED = 12;
const at = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;
const say = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const whole = (number) => Math.round(number).toLocaleString("en");
const mine = new Set(); // requests that this page has sent
const short = (id) => mine.has(id) ? "this chat" : id.slice(0, 8);
const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";
function time(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 1) return (1000 * s).toFixed(s < 0.01 ? 1 : 0) + " ms";
  return s < 10 ? s.toFixed(1) + " s" : whole(s) + " s";
}

// -- colors: neighbours in order of arrival differ most

const hues = new Map();
function color(id, alpha = 1) {
  if (!hues.has(id)) hues.set(id, (205 + 137.508 * hues.size) % 360);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${hues.get(id)} ${dark ? 55 : 58}% ${dark ? 62 : 46}% / ${alpha})`;
}
const tint = (name) => getComputedStyle(at("probe-" + name)).color;
for (const name of ["text", "soft", "line", "card", "free", "cached"]) {
  // A canvas needs the color that light-dark() comes to.
  const probe = document.createElement("span");
  probe.id = "probe-" + name;
  probe.hidden = true;
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
}

function prepared(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return [pen, width];
}

// -- the running batch: bars[].parts are [from, to, phase], in seconds of this page's clock

let bars = [], live = new Map();
function follow(requests, now) {
  const known = new Set(requests.map((request) => request.id));
  for (const [id, bar] of live) {
    if (!known.has(id)) {
      bar.parts.at(-1)[1] = now;
      live.delete(id);
    }
  }
  for (const request of requests) {
    const runs = request.status !== "pending";
    let bar = live.get(request.id);
    if (!bar && !runs) continue;
    if (!bar) {
      const taken = new Set([...live.values()].map((other) => other.lane));
      let lane = 0;
      while (taken.has(lane)) lane++;
      bar = { id: request.id, lane, parts: [] };
      live.set(request.id, bar);
      bars.push(bar);
    }
    const phase = runs ? request.status : "preempted";
    const last = bar.parts.at(-1);
    if (last) last[1] = now;
    if (!last || last[2] !== phase) bar.parts.push([now, now, phase]);
    bar.request = request;
  }
  bars = bars.filter((bar) => live.has(bar.id) || bar.parts.at(-1)[1] > now - SPAN_S);
  if (hues.size > 5000) hues.clear();
}

function progress(request) {
  const generated = request.generated_tokens.reduce((sum, count) => sum + count, 0);
  if (request.status === "prefilling") {
    return `${whole(request.computed_tokens)} of ${whole(request.prompt_tokens)} prompt tokens`;
  }
  const choices = request.generated_tokens.length;
  return `${whole(generated)} of ${choices > 1 ? choices + " × " : ""}${whole(request.max_tokens)} tokens`;
}

function drawLanes() {
  const now = seconds();
  const most = bars.reduce((lanes, bar) => Math.max(lanes, bar.lane + 1), 0);
  const lanes = Math.min(LANES, Math.max(4, most)), row = 22, gutter = 210, axis = 18;
  const [pen, width] = prepared(at("lanes"), lanes * row + axis);
  const right = width - (width > 620 ? gutter : 8), x = (t) => right - (now - t) * right / SPAN_S;
  pen.lineWidth = 1;
  pen.strokeStyle = tint("line");
  pen.fillStyle = tint("soft");
  pen.textAlign = "center";
  for (let ago = 0; ago <= SPAN_S; ago += 10) {
    pen.beginPath();
    pen.moveTo(x(now - ago), 0);
    pen.lineTo(x(now - ago), lanes * row);
    pen.stroke();
    if (ago && ago < SPAN_S) pen.fillText(`−${ago} s`, x(now - ago), lanes * row + 10);
  }
  pen.textAlign = "right";
  pen.fillText("now", right, lanes * row + 10);
  for (const bar of bars) {
    if (bar.lane >= lanes) continue;
    const y = bar.lane * row + 3, high = row - 6, running = live.has(bar.id);
    bar.parts.forEach(([from, to, phase], place) => {
      const open = running && place === bar.parts.length - 1;
      const left = Math.max(0, x(from)), wide = Math.max(2, x(open ? now : to) - left);
      if (x(open ? now : to) < 0) return;
      pen.fillStyle = color(bar.id, running ? 1 : 0.45);
      if (phase === "preempted") {
        pen.fillRect(left, y + high / 2 - 1, wide, 2);
      } else if (phase === "prefilling") {
        pen.save();
        pen.beginPath();
        pen.rect(left, y, wide, high);
        pen.clip();
        pen.strokeStyle = pen.fillStyle;
        pen.lineWidth = 2;
        for (let s = left - high; s < left + wide; s += 6) {
          pen.beginPath();
          pen.moveTo(s, y + high);
          pen.lineTo(s + high, y);
          pen.stroke();
        }
        pen.restore();
      } else {
        pen.beginPath();
        pen.roundRect(left, y, wide, high, 3);
        pen.fill();
      }
    });
    pen.textAlign = "left";
    if (running && right >= width - 100) {
      // No room beside the lane: on it, in the card's color around the letters.
      pen.strokeStyle = tint("card");
      pen.lineWidth = 4;
      pen.lineJoin = "round";
      pen.strokeText(short(bar.id), 4, y + high / 2);
      pen.fillStyle = tint("text");
      pen.fillText(short(bar.id), 4, y + high / 2);
    } else if (running) {
      pen.fillStyle = color(bar.id);
      pen.fillText(short(bar.id), right + 10, y + high / 2);
      pen.fillStyle = tint("soft");
      pen.fillText(progress(bar.request), right + 76, y + high / 2, gutter - 80);
    }
  }
  const more = most > lanes ? `, ${LANES} of ${most} lanes` : "";
  say("lanes-more", `the last ${SPAN_S} seconds${more}`);
}

// -- the queue

function drawQueue(requests) {
  const waiting = requests.filter((request) => request.waits_for);
  const body = at("queue").tBodies[0];
  at("queue").hidden = !waiting.length;
  at("queue-none").hidden = waiting.length > 0;
  body.replaceChildren(...waiting.slice(0, QUEUED).map((request) => {
    const line = document.createElement("tr");
    const cells = [
      short(request.id), whole(request.prompt_tokens), time(request.age), request.waits_for,
    ];
    cells.forEach((text, column) => {
      const cell = line.insertCell();
      cell.textContent = text;
      if (column === 1 || column === 2) cell.className = "number";
    });
    return line;
  }));
  const hidden = waiting.length - QUEUED;
  say("queue-more", hidden > 0 ? `the first ${QUEUED}; ${whole(hidden)} more` : "");
}

// -- the block map

let cells = [], cacheView = null, side = 12, columns = 1;
function drawMap() {
  if (!cacheView) return;
  const many = cacheView.per_cell;
  cells = cacheView.blocks.flatMap((run) => Array(Math.ceil(run.count / many)).fill(run));
  side = cells.length > 1500 ? 8 : cells.length > 600 ? 12 : 16;
  columns = Math.max(1, Math.floor(at("map").clientWidth / side));
  const [pen] = prepared(at("map"), Math.ceil(cells.length / columns) * side);
  cells.forEach((run, place) => {
    const left = (place % columns) * side, top = Math.floor(place / columns) * side, size = side - 2;
    const shown = run.state === "held" && !run.requests.length ? "soft" : run.state;
    pen.fillStyle = run.requests.length ? color(cacheView.requests[run.requests[0]]) : tint(shown);
    pen.beginPath();
    pen.roundRect(left, top, size, size, 2);
    pen.fill();
    if (run.references > 1) {
      pen.fillStyle = tint("card");
      pen.beginPath();
      pen.arc(left + size / 2, top + size / 2, size / 5, 0, 7);
      pen.fill();
    }
  });
  const what = cacheView.groups > 1 ? `units, ${cacheView.groups} a block` : "blocks";
  const joined = many > 1 ? `; a square is ${many} of them, and held if one is` : "";
  say("map-more", `${whole(cacheView.units)} ${what}, of ${cacheView.block_size} tokens${joined}`);
}
at("map").addEventListener("mousemove", (event) => {
  const place = Math.floor(event.offsetY / side) * columns + Math.floor(event.offsetX / side);
  const run = cells[place];
  if (!run) return;
  const who = run.requests.map((number) => short(cacheView.requests[number])).join(", ");
  const many = cacheView.per_cell, first = cacheView.start + place * many;
  // The references of a square are those of one of its blocks, not of all who are named.
  const count = many > 1 ? "" : `${run.references} sequence${run.references > 1 ? "s" : ""} of `;
  const held = who ? `held by ${count}${who}` : "held by others";
  const last = Math.min(first + many, cacheView.units) - 1;
  const units = many > 1 ? `${whole(first)} to ${whole(last)}` : first;
  say("hint", `${units}: ${run.state === "held" ? held : run.state}`);
});
at("map").addEventListener("mouseleave", () => say("hint", ""));

// -- polling: one question at a time, and none while nobody looks

let key = ""; // of the public port, where it needs one: in this variable alone
// A header's characters are bytes.
const credentials = () =>
  key ? { authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` } : {};
async function ask(path) {
  const signal = AbortSignal.timeout(5000);
  const answer = await fetch(path, { cache: "no-store", headers: credentials(), signal });
  if (!answer.ok) throw await refusal(answer);
  return answer;
}
async function refusal(answer) {
  const { message, code } = (await answer.json().catch(() => ({}))).error ?? {};
  return Object.assign(new Error(message ?? `status ${answer.status}`), { status: answer.status, code });
}
// What keeps a server that starts or drains from serving is no fault.
const kind = (error) => error.code === "not_ready" ? "wait" : "bad";
const reason = (error) =>
  error instanceof TypeError || error.name === "TimeoutError" ? "no answer" : error.message;
function show(kind, text) {
  at("state").className = kind;
  say("state", text);
}
async function every(interval, look, isWanted = () => true) {
  for (;;) {
    if (!document.hidden && isWanted()) {
      try {
        await look();
      } catch (error) {
        show(kind(error), reason(error));
      }
    }
    await new Promise((done) => setTimeout(done, interval()));
  }
}
if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
  // Ten frames a second look smooth at this speed, and cost a sixth.
  setInterval(() => { if (live.size && !document.hidden) requestAnimationFrame(drawLanes); }, 100);
}
addEventListener("resize", () => { drawLanes(); drawMap(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLanes(); drawMap(); });

// -- the conversation. What a model or a person says is set as text, never as markup.

const HERE = location.origin, PLACEHOLDER = "YOUR_KEY";
let model = "", keyed = false, running = null, pending = [];
let conversation = []; // as the API's field messages has it
const prefix = { found: 0, asked: 0 }; // prompt tokens of this page's requests

function make(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

function keepAtEnd(change) {
  const log = at("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function card(who, className) {
  const article = make("article", className);
  article.append(make("h3", "", who));
  keepAtEnd(() => at("log").append(article));
  return article;
}

// A part of a card that grows: one text node, made when its first text comes.
function growing(parent, build) {
  let node = null;
  return (text) => {
    if (!text) return;
    keepAtEnd(() => {
      if (!node) {
        node = document.createTextNode("");
        build(parent).append(node);
      }
      node.data += text;
    });
  };
}
function reasoningOf(article) {
  const details = make("details"), said = make("div", "said");
  details.append(make("summary", "", "Reasoning"), said);
  article.append(details);
  return said;
}
function saidOf(article) {
  const said = make("div", "said");
  article.append(said);
  return said;
}

function showCall(article, call) {
  const box = make("div", "call"), label = make("label", "", `Result of ${call.function.name}`);
  const result = make("textarea");
  result.rows = 2;
  label.append(result);
  box.append(make("b", "", `Calls ${call.function.name}`), make("pre", "", call.function.arguments), label);
  article.append(box);
  pending.push({ id: call.id, result });
}

// Every call that was made has a result before the next message.
function takeResults() {
  for (const { id, result } of pending) {
    conversation.push({ role: "tool", tool_call_id: id, content: result.value });
    result.readOnly = true;
  }
  pending = [];
  for (const button of at("log").querySelectorAll("button")) button.remove();
}

function tools() {
  say("tools-fault", "");
  const text = at("tools").value.trim();
  if (!text) return [];
  try {
    const list = JSON.parse(text);
    if (Array.isArray(list)) return list;
  } catch { /* said below */ }
  at("tools-details").open = true;
  say("tools-fault", "is no JSON list");
  throw new Error("Tools: is no JSON list");
}

function number(id, name) {
  const field = at(id);
  if (field.validity.badInput || !field.checkValidity()) throw new Error(`${name}: ${field.validationMessage}`);
  return field.value === "" ? undefined : field.valueAsNumber;
}

// Undefined fields are left out of JSON.
function body(messages) {
  const given = tools();
  return {
    model,
    messages,
    temperature: number("temperature", "Temperature"),
    max_tokens: number("length", "Longest answer"),
    tools: given.length ? given : undefined,
    stream: true,
  };
}

// Server-sent events: lines of JSON after "data: ", until [DONE].
async function* events(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function send() {
  const text = at("message").value;
  if (running || !text.trim()) return;
  takeResults();
  const before = conversation.length;
  conversation.push({ role: "user", content: text });
  card("You", "user").append(make("div", "said", text));
  at("message").value = "";
  return answer(before, text);
}

async function answer(before, text) {
  const control = running = new AbortController(), turn = conversation;
  at("send").disabled = true;
  at("stop").disabled = false;
  at("log").setAttribute("aria-busy", "true"); // is read aloud once it is whole
  say("progress", "answering");
  const article = card("Model", "model"), note = make("p", "note");
  const think = growing(article, reasoningOf), speak = growing(article, saidOf);
  const said = { role: "assistant", content: "" }, calls = [], began = seconds();
  let usage = null, finish = "", fault = "", first = 0;
  try {
    const sent = { ...body(turn), stream_options: { include_usage: true } };
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { ...credentials(), "content-type": "application/json" },
      body: JSON.stringify(sent),
      signal: control.signal,
    });
    if (!response.ok) throw await refusal(response);
    mine.add(response.headers.get("x-request-id"));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const { delta, finish_reason } of event.choices ?? []) {
        first ||= seconds();
        think(delta.reasoning_content);
        speak(delta.content);
        said.content += delta.content ?? "";
        for (const { index, id, function: part } of delta.tool_calls ?? []) {
          calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
          calls[index].function.name += part.name ?? "";
          calls[index].function.arguments += part.arguments ?? "";
        }
        finish = finish_reason ?? finish;
      }
    }
    if (!finish) throw new Error("the answer ended early");
  } catch (error) {
    const stopped = error.name === "AbortError";
    finish = "";
    fault = stopped ? "stopped" : reason(error);
    if (!stopped) note.className = "note bad";
    if (error.status === 401) askForKey("The server no longer takes this key.");
  }
  const whole_calls = finish ? calls.filter(Boolean) : [];
  if (whole_calls.length) said.tool_calls = whole_calls;
  if (said.content || said.tool_calls) {
    turn.push(said);
  } else {
    // A question without an answer is not sent again: templates want turns to alternate.
    turn.length = before;
    if (turn === conversation && text && !at("message").value) at("message").value = text;
    fault ||= "the answer is empty";
  }
  keepAtEnd(() => {
    for (const call of whole_calls) showCall(article, call);
    if (whole_calls.length) {
      const button = make("button", "", "Send the results");
      button.type = "button";
      button.addEventListener("click", sendResults);
      article.append(button);
    }
    note.textContent = [fault, finish === "length" ? "cut off at the longest answer" : "", counts(usage, began, first)]
      .filter(Boolean).join(" · ");
    article.append(note);
  });
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
  at("log").setAttribute("aria-busy", "false");
  say("progress", fault || "the answer is complete");
  writeCode();
}

function counts(usage, began, first) {
  if (!usage) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, now = seconds();
  prefix.found += cached;
  prefix.asked += usage.prompt_tokens;
  const rate = usage.completion_tokens > 1 && now > first ? (usage.completion_tokens - 1) / (now - first) : 0;
  return [
    `prompt ${whole(usage.prompt_tokens)} tokens, ${whole(cached)} from the cache`,
    `answer ${whole(usage.completion_tokens)} tokens`,
    `first after ${time(first - began)}${rate ? `, then ${whole(rate)} tokens/s` : ""}`,
  ].join(" · ");
}

function sendResults() {
  if (running) return;
  takeResults();
  at("message").focus();
  return answer(conversation.length, "");
}

function stop() {
  running?.abort();
}

at("send").addEventListener("click", () => { send(); at("message").focus(); });
at("stop").addEventListener("click", () => { stop(); at("message").focus(); });
at("message").addEventListener("keydown", (event) => {
  // While an input method composes, Enter is its own.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
at("anew").addEventListener("click", () => { newChat(); at("message").focus(); });
function newChat() {
  stop();
  conversation = [];
  pending = [];
  at("log").replaceChildren();
  say("progress", "");
  writeCode();
}

// -- the request as code

const shellText = (text) => `'${text.replaceAll("'", "'\\''")}'`;
// JSON's texts and numbers are Python's as well.
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const fields = Object.entries(value).map(([name, field]) => `${JSON.stringify(name)}: ${python(field)}`);
  return `{${fields.join(", ")}}`;
}

function writeCode() {
  if (!at("code-details").open) return;
  let sent;
  try {
    sent = body([...conversation, { role: "user", content: at("message").value || "Hello" }]);
  } catch (error) {
    say("curl", error.message);
    say("python", error.message);
    return;
  }
  const header = keyed ? ` \\\n  -H 'Authorization: Bearer ${PLACEHOLDER}'` : "";
  say("curl", `curl -N ${HERE}/v1/chat/completions${header} \\\n  -H 'Content-Type: application/json' \\\n  -d ${shellText(JSON.stringify(sent))}`);
  const fields = Object.entries(sent).filter(([, value]) => value !== undefined);
  say("python", `from openai import OpenAI

client = OpenAI(base_url="${HERE}/v1", api_key="${keyed ? PLACEHOLDER : "none"}")
stream = client.chat.completions.create(
${fields.map(([name, value]) => `    ${name}=${python(value)},`).join("\n")}
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
`);
}
for (const id of ["message", "temperature", "length", "tools"]) at(id).addEventListener("input", writeCode);
at("code-details").addEventListener("toggle", writeCode);
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", async () => {
    const shown = at(button.dataset.copies);
    getSelection().selectAllChildren(shown); // where the browser denies the clipboard, one copies by hand
    try {
      await navigator.clipboard.writeText(shown.textContent);
      say("progress", "copied");
    } catch {
      say("progress", "selected: copy it with the keyboard");
    }
  });
}

// -- the key, and what the server says of itself

let asking = false;
function askForKey(fault) {
  asking = true;
  key = model = "";
  say("model", "");
  say("key-fault", fault);
  at("key-section").hidden = false;
  at("talk").hidden = at("picture").hidden = at("forget").hidden = true;
  show("wait", "needs a key");
  at("key").focus();
}
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  asking = !key;
  connect().catch((error) => show(kind(error), reason(error)));
});
at("forget").addEventListener("click", () => {
  newChat();
  at("message").value = "";
  mine.clear();
  live.clear();
  bars = [];
  cacheView = null;
  askForKey("");
});

let connecting = null;
function connect() {
  connecting ??= greet().finally(() => { connecting = null; });
  return connecting;
}
async function greet() {
  const tried = key;
  try {
    const { data } = await (await ask("/v1/models")).json();
    model = data[0].id;
    at("temperature").placeholder = data[0].sampling_defaults?.temperature ?? 1;
    at("length").max = data[0].max_model_len;
  } catch (error) {
    if (error.status !== 401) throw error;
    keyed = true;
    askForKey(tried ? "The server does not take this key." : "");
    return;
  }
  say("model", model);
  at("key-section").hidden = true;
  at("talk").hidden = at("picture").hidden = false;
  at("forget").hidden = at("others").hidden = !keyed;
  at("message").focus();
  writeCode();
}

// -- the picture beside it

function drawTiles({ requests, others, cache }) {
  const runs = requests.filter((request) => request.status !== "pending").length;
  const waits = requests.length - runs;
  const ofOthers = (count) => keyed ? `${whole(count)} of others` : "";
  say("running", whole(runs + others.running));
  say("running-more", ofOthers(others.running));
  say("waiting", whole(waits + others.waiting));
  say("waiting-more", ofOthers(others.waiting));
  const held = cache.units - cache.free - cache.cached;
  say("held", percent(held / cache.units));
  say("held-more", `${whole(held)} of ${whole(cache.units)} blocks`);
  say("hits", prefix.asked ? percent(prefix.found / prefix.asked) : "–");
  say("hits-more", `of ${whole(prefix.asked)} tokens of this chat`);
}

// Twice as often while an answer comes, which may take no second.
every(() => running ? FAST_MS / 2 : FAST_MS, async () => {
  if (asking) return;
  if (!model) await connect();
  if (!model) return;
  let picture;
  try {
    picture = await (await ask("/page/live")).json();
  } catch (error) {
    if (error.status !== 401 || asking) throw error;
    return askForKey("The server no longer takes this key.");
  }
  if (!model) return; // the key was forgotten meanwhile
  follow(picture.requests, seconds());
  cacheView = picture.cache;
  drawTiles(picture);
  drawQueue(picture.requests);
  drawLanes();
  drawMap();
  show("good", "serving");
});

// An answer as it comes, without a library: node client.mjs [QUESTION]
const base = process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1";
const headers = {
  "content-type": "application/json",
  authorization: `Bearer ${process.env.OPENAI_API_KEY ?? "none"}`,
};
const models = await (await fetch(`${base}/models`, { headers })).json();
const question = process.argv.slice(2).join(" ") || "What is a KV cache?";
const answer = await fetch(`${base}/chat/completions`, {
  method: "POST",
  headers,
  body: JSON.stringify({
    model: models.data[0].id,
    messages: [{ role: "user", content: question }],
    temperature: 0,
    stream: true,
  }),
});
if (!answer.ok) throw new Error(`HTTP ${answer.status}: ${await answer.text()}`);
let rest = "";
for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + text).split("\n");
  rest = lines.pop(); // the part of a line that has come
  for (const line of lines) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const [choice] = JSON.parse(line.slice("data: ".length)).choices;
    process.stdout.write(choice?.delta.content ?? "");
  }
}
process.stdout.write("\n");

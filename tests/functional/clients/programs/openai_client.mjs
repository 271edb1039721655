// Ask the server at argv[2] with OpenAI's JavaScript client; print what it understood.
import OpenAI from "openai";

const [, , baseURL, tool] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about the sea." }];
const ask = (fields) =>
  client.chat.completions.create({
    model: "tiny", messages, temperature: 0, max_tokens: 12, ...fields,
  });

const whole = await ask({});
let streamed = "", streamedUsage = 0;
for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  streamedUsage = chunk.usage?.total_tokens ?? streamedUsage;
}
const called = await ask({ tools: [JSON.parse(tool)], tool_choice: "required", max_tokens: 400 });
const call = called.choices[0].message.tool_calls[0].function;
const text = await client.completions.create({
  model: "tiny", prompt: "Once upon a time", temperature: 0, max_tokens: 12,
});
let error = "none";
try {
  await ask({ n: 999 });
} catch (refused) {
  if (!(refused instanceof OpenAI.BadRequestError)) throw refused;
  error = refused.message;
}
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed,
  usage: whole.usage.total_tokens, streamed_usage: streamedUsage,
  call: call.name, arguments: call.arguments, text: text.choices[0].text, error,
}));

// A chat of two turns from Node.js: node chat.mjs [agent] [socket]
import { Client, KvdError } from "./kvd.mjs";

const [agent = "node", socket] = process.argv.slice(2);
const client = await Client.connect(socket);
const messages = [{ role: "user", content: "Name a colour." }];

for (const next of ["And another one?", null]) {
  const options = { onEvent: (event) => event.type === "text" && process.stderr.write(event.text) };
  const result = await client.call("chat", { agent, messages, max_tokens: 12 }, options);
  process.stderr.write("\n");
  console.log(JSON.stringify({ match: result.match, prompt: result.prompt_tokens, cached: result.cached_tokens,
    text: result.text, durable: result.durable }));
  messages.push(result.message);
  if (next) messages.push({ role: "user", content: next });
}

const impatient = new AbortController();
const onEvent = (event) => event.type === "text" && impatient.abort();
try {
  await client.call("generate", { agent: `${agent}-long`, text: "Once upon a time", max_tokens: 5000,
    on_context_full: "stop" }, { onEvent, signal: impatient.signal });
} catch (error) {
  if (!(error instanceof KvdError)) throw error;
  console.log(JSON.stringify({ error: error.name, code: error.code }));
}
try {
  await client.call("agent.info", { agent: "nobody" });
} catch (error) {
  console.log(JSON.stringify({ error: error.name, code: error.code }));
}
client.close();

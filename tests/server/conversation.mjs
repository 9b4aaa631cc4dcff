// Talks with a server through the npm package `openai`, and prints what it has heard as JSON.
// node conversation.mjs URL JSON, with {"system": text, "questions": [text, ...]}

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const { system, questions } = JSON.parse(process.argv[3]);
const greedy = { model: "tiny", temperature: 0, max_tokens: 12 };

/** The replies to each question in turn; `ask` gets the messages so far. */
async function converse(ask) {
  const messages = [{ role: "system", content: system }];
  const replies = [];
  for (const content of questions) {
    messages.push({ role: "user", content });
    replies.push(await ask(messages));
    messages.push({ role: "assistant", content: replies.at(-1) });
  }
  return replies;
}

async function whole(messages) {
  const completion = await client.chat.completions.create({ ...greedy, messages });
  return completion.choices[0].message.content;
}

async function streamed(messages) {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...greedy, messages, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  return text;
}

async function helped(messages) {
  return await client.chat.completions.stream({ ...greedy, messages }).finalContent();
}

async function refusal(request) {
  try {
    await client.chat.completions.create({ ...greedy, messages: [{ role: "user", content: "a" }], ...request });
  } catch (error) {
    const { status, type, param, code, message } = error;
    return { kind: error.constructor.name, status, type, param, code, message };
  }
  throw new Error("it was not refused");
}

/** Leaves a stream after its first chunk. */
async function left(messages) {
  const stream = await client.chat.completions.create({ ...greedy, messages, max_tokens: 100, stream: true });
  for await (const chunk of stream) return chunk.object;
}

const first = [{ role: "user", content: questions[0] }];
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...greedy, messages: first, ...options })) {
  usage = chunk.usage ?? usage;
}
const heard = {
  models: (await client.models.list()).data.map((card) => card.id),
  whole: await converse(whole),
  streamed: await converse(streamed),
  helped: await converse(helped),
  together: await Promise.all([converse(whole), converse(streamed)]),
  usage,
  chat: await client.chat.completions.create({ ...greedy, messages: first, logprobs: true, top_logprobs: 2 }),
  completion: await client.completions.create({ ...greedy, prompt: questions[0], logprobs: 2, echo: true }),
  refused: await refusal({ top_p: 7 }),
  unknown: await refusal({ model: "another" }),
  left: await left(first),
};
console.log(JSON.stringify(heard));

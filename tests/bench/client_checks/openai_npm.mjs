// The openai package for JavaScript: chat completions, completions, responses, models.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ADDRESS, MAX_TOKENS, MODEL, TOOL_SCHEMA, check, collected, expect, expectCity, main } from "./checking.mjs";

const client = new OpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: "none", maxRetries: 0 });
const model = MODEL;
const messages = [{ role: "user", content: "How is Rome?" }];
const TOOL = { name: "weather", description: "Says the weather.", parameters: TOOL_SCHEMA };
const City = z.object({ city: z.enum(["Rome", "Oslo"]), is_warm: z.boolean() });

check("openai", "chat, streamed with usage", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
  expect(answer.choices[0].message.content && answer.usage.completion_tokens > 0, answer);
  const options = { stream: true, stream_options: { include_usage: true }, max_tokens: 8 };
  const chunks = await collected(await client.chat.completions.create({ model, messages, ...options }));
  expect(chunks.at(-1).usage.completion_tokens > 0, chunks.at(-1));
});

check("openai", "tools, forced, by the stream helper; runTools", async () => {
  const tools = [{ type: "function", function: TOOL }];
  const ask = { model, messages, tools, tool_choice: "required", max_tokens: MAX_TOKENS };
  const answer = await client.chat.completions.stream(ask).finalChatCompletion();
  const [call] = answer.choices[0].message.tool_calls;
  expect(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city), call);
  const run = { ...TOOL, parse: JSON.parse, function: async () => "sunny" };
  const runner = client.chat.completions.runTools(
    { model, messages, tools: [{ type: "function", function: run }], max_tokens: MAX_TOKENS, stop: ["a", "e", "i", "o"] },
    { maxChatCompletions: 2 },
  );
  expect((await runner.finalChatCompletion()).choices[0].finish_reason, "runTools");
});

check("openai", "chat.completions.parse", async () => {
  const format = zodResponseFormat(City, "city");
  const answer = await client.chat.completions.parse({ model, messages, response_format: format, max_tokens: MAX_TOKENS });
  expectCity(answer.choices[0].message.parsed);
});

check("openai", "responses, streamed, parse, tools", async () => {
  const answer = await client.responses.create({ model, input: "How is Rome?", max_output_tokens: 8 });
  expect(answer.output_text, answer);
  const streamed = await client.responses.stream({ model, input: "Hi", max_output_tokens: 50 }).finalResponse();
  expect(streamed.output_text, streamed);
  const format = zodTextFormat(City, "city");
  const parsed = await client.responses.parse({ model, input: "Hi", text: { format }, max_output_tokens: MAX_TOKENS });
  expectCity(parsed.output_parsed);
  const tools = [{ type: "function", ...TOOL, strict: true }];
  const forced = { model, input: "Hi", tools, tool_choice: "required", max_output_tokens: MAX_TOKENS };
  const call = (await client.responses.create(forced)).output.at(-1);
  expect(["Rome", "Oslo"].includes(JSON.parse(call.arguments).city), call);
});

check("openai", "completions, models", async () => {
  const answer = await client.completions.create({ model, prompt: "Once", max_tokens: 8 });
  expect(answer.choices[0].text, answer);
  const models = await collected(client.models.list());
  expect(models.length === 1, models);
});

await main();

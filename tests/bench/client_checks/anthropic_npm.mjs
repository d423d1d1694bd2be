// The @anthropic-ai/sdk package: messages, streams, tools, structured answers, counts.
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { ADDRESS, MAX_TOKENS, MODEL, TOOL_SCHEMA, check, collected, expect, expectCity, main } from "./checking.mjs";

const NAME = "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: ADDRESS, apiKey: "none", maxRetries: 0 });
const model = MODEL;
const messages = [{ role: "user", content: "How is Rome?" }];
const tools = [{ name: "weather", description: "Says the weather.", input_schema: TOOL_SCHEMA }];
const City = z.object({ city: z.enum(["Rome", "Oslo"]), is_warm: z.boolean() });

check(NAME, "messages, streamed", async () => {
  const answer = await client.messages.create({ model, messages, max_tokens: 8 });
  expect(answer.content[0].text && answer.usage.output_tokens > 0, answer);
  const final = await client.messages.stream({ model, messages, max_tokens: 8 }).finalMessage();
  expect(final.content[0].text && final.usage.output_tokens > 0, final);
});

check(NAME, "tools, a forced call and its result, streamed", async () => {
  const ask = { model, messages, tools, tool_choice: { type: "any" }, max_tokens: MAX_TOKENS };
  const answer = await client.messages.stream(ask).finalMessage();
  const call = answer.content.at(-1);
  expect(["Rome", "Oslo"].includes(call.input.city), call);
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] };
  const turns = [...messages, { role: "assistant", content: answer.content }, result];
  expect((await client.messages.create({ model, messages: turns, tools, max_tokens: 8 })).stop_reason, answer);
});

check(NAME, "messages.parse", async () => {
  const output_config = { format: zodOutputFormat(City) };
  const answer = await client.messages.parse({ model, messages, max_tokens: MAX_TOKENS, output_config });
  expectCity(answer.parsed_output);
});

check(NAME, "countTokens, models", async () => {
  expect((await client.messages.countTokens({ model, messages })).input_tokens > 2, "count");
  const models = await collected(client.models.list());
  expect(models.length === 1, models);
});

await main();

// Vercel's ai package with three providers: text, streams, objects, tools.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { ADDRESS, MAX_TOKENS, MODEL, check, collected, expect, expectCity, main } from "./checking.mjs";

const schema = z.object({ city: z.enum(["Rome", "Oslo"]), is_warm: z.boolean() });
const weather = tool({
  description: "Says the weather.",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const openai = createOpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "served",
  baseURL: `${ADDRESS}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const anthropic = createAnthropic({ baseURL: `${ADDRESS}/v1`, apiKey: "none" });
const providers = [
  ["@ai-sdk/openai-compatible", "chat", compatible(MODEL)],
  ["@ai-sdk/openai", "responses", openai.responses(MODEL)],
  ["@ai-sdk/openai", "chat", openai.chat(MODEL)],
  ["@ai-sdk/anthropic", "messages", anthropic(MODEL)],
];

for (const [name, kind, model] of providers) {
  // Else it refers to items by their ids in later steps, and moe-serve stores none.
  const providerOptions = { openai: { store: false } };
  const ask = { model, prompt: "How is Rome?", system: "Be brief.", maxRetries: 0, providerOptions };
  check(name, `${kind}: generateText, streamText`, async () => {
    const answer = await generateText({ ...ask, maxOutputTokens: 8 });
    expect(answer.text && answer.usage.outputTokens > 0, answer);
    const stream = streamText({ ...ask, maxOutputTokens: 8, onError: () => {} });
    const parts = await collected(stream.fullStream);
    const failed = parts.find((part) => part.type === "error");
    if (failed) throw failed.error;
    expect((await stream.usage).outputTokens > 0, parts.at(-1));
  });
  check(name, `${kind}: tools, two steps, whole and streamed`, async () => {
    const first = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const tools = { tools: { weather }, prepareStep: first, stopWhen: stepCountIs(2), maxOutputTokens: 50 };
    const { steps } = await generateText({ ...ask, ...tools });
    expect(steps.length === 2 && steps[0].toolResults[0].output.startsWith("sunny"), steps);
    const stream = streamText({ ...ask, ...tools, onError: () => {} });
    const parts = await collected(stream.fullStream);
    const failed = parts.find((part) => part.type === "error");
    if (failed) throw failed.error;
    expect((await stream.steps).length === 2, parts.length);
  });
  check(name, `${kind}: generateObject, streamObject, Output.object`, async () => {
    expectCity((await generateObject({ ...ask, schema, maxOutputTokens: MAX_TOKENS })).object);
    const stream = streamObject({ ...ask, schema, maxOutputTokens: MAX_TOKENS, onError: () => {} });
    await collected(stream.partialObjectStream);
    expectCity(await stream.object);
    const output = Output.object({ schema });
    expectCity((await generateText({ ...ask, output, maxOutputTokens: MAX_TOKENS })).output);
  });
}

check("@ai-sdk/openai-compatible", "completion model", async () => {
  const answer = await generateText({ model: compatible.completionModel(MODEL), prompt: "Once", maxOutputTokens: 8 });
  expect(answer.text, answer);
});

await main();

// What the checks of npm's clients share: where the server is, and how a check is run and written. See checking.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

export const ADDRESS = process.env.MOE_SERVE_URL ?? "http://127.0.0.1:8080";
export const MODEL = process.env.MOE_SERVE_MODEL ?? "default";
export const MAX_TOKENS = 200;
const MAX_MESSAGE = 300;

// Every string of these schemas is one of a few: a model that says nonsense ends them all the same.
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] }, is_warm: { type: "boolean" } },
  required: ["city", "is_warm"],
  additionalProperties: false,
};
export const TOOL_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

const checks = [];

export function check(client, what, run) {
  checks.push({ client, what, run });
}

export function expect(isRight, found) {
  if (!isRight) throw new Error(`found ${JSON.stringify(found)}`);
}

export function expectCity(found) {
  const value = typeof found === "string" ? JSON.parse(found) : found;
  const isCity = ["Rome", "Oslo"].includes(value.city) && typeof value.is_warm === "boolean";
  expect(isCity && Object.keys(value).length === 2, value);
}

export async function collected(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

function versionOf(client) {
  try {
    const folder = path.join(process.cwd(), "node_modules", client);
    return JSON.parse(readFileSync(path.join(folder, "package.json"), "utf8")).version;
  } catch {
    return createRequire(import.meta.url)(`${client}/package.json`).version;
  }
}

export async function main() {
  const wanted = process.argv.slice(2);
  for (const { client, what, run } of checks) {
    if (wanted.length && !wanted.some((word) => what.includes(word))) continue;
    let fault = "";
    try {
      await run();
    } catch (found) {
      const cause = found.cause ? ` (${found.cause.message ?? found.cause})` : "";
      fault = `${found.name}: ${found.message}${cause}`.replace(/\s+/g, " ").slice(0, MAX_MESSAGE);
    }
    console.log(JSON.stringify({ client: `${client} (npm)`, version: versionOf(client), what, fault }));
  }
}

// The schemas of the OpenAI Agents SDK of npm: which of the lines of a file they refuse, and how many they know.
//
// The SDK reads what they refuse as an event of another server, or dies of it. Arguments: the file, of one JSON object a line.
import fs from 'node:fs';
import { pathToFileURL } from 'node:url';

const path = 'node_modules/@openai/agents-realtime/dist/openaiRealtimeEvents.mjs';
const { realtimeServerEventSchema: schema } = await import(pathToFileURL(path));
const known = new Set(schema.options.map((it) => it.shape.type.value));
const report = { read: 0, failures: [] };
for (const line of fs.readFileSync(process.argv[2], 'utf8').split('\n').filter(Boolean)) {
  const event = JSON.parse(line);
  if (!known.has(event.type)) continue;
  const { success, error } = schema.safeParse(event);
  if (success) report.read += 1;
  else report.failures.push(`${event.type}: ${JSON.stringify(error.issues)}`);
}
console.log(JSON.stringify(report));

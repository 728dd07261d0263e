// Validates AsyncAPI documents with the official parser: `node validate.mjs FILE...`. It prints one
// JSON array for each file, of what the parser found: [severity, code, path, message], where
// severity is 0 for an error, 1 for a warning, 2 for information, 3 for a hint.

import { readFileSync } from "node:fs";
import { Parser } from "@asyncapi/parser";

const parser = new Parser();
for (const path of process.argv.slice(2)) {
  const { diagnostics } = await parser.parse(readFileSync(path, "utf8"));
  const found = diagnostics.map((each) => [
    each.severity,
    each.code,
    each.path.join("/"),
    each.message,
  ]);
  console.log(JSON.stringify(found));
}

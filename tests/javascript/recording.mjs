// What a page is told of its recording, and how it asks for none.
import assert from "node:assert/strict";
import { connect, ReportedError } from "../../runtime/web/antiphon.js";

const [, , url, strict] = process.argv;

for (const mode of ["audio", "chat"]) {
  const recorded = await connect(url, { mode });
  assert.equal(recorded.created.recording, "on");
  assert.notEqual(recorded.created.recordingId, "");
  assert.equal(recorded.created.recordingNotice, "This call is recorded.");
  await recorded.close();

  const unrecorded = await connect(url, { mode, record: false });
  assert.deepEqual(
    [unrecorded.created.recording, unrecorded.created.recordingId, unrecorded.created.recordingNotice],
    ["off", "", ""],
  );
  await unrecorded.close();

  await assert.rejects(connect(strict, { mode, record: false }), ReportedError);
}
console.log("ok");
process.exit(0);

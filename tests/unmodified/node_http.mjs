// The `openai` package of npm, its chat completions and its transcriptions over HTTP.
//
// Arguments: scene, base address, model, question (PCM16, 24 kHz).
import fs from 'node:fs';
import OpenAI, { toFile } from 'openai';

const SECOND_BYTES = 48000;
const [scene, baseURL, model, file] = process.argv.slice(2);
const question = fs.readFileSync(file);
const report = { events: {}, words: '', sound_s: 0, failures: [], interrupted_s: null };
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });

const head = Buffer.alloc(44);
head.write('RIFF');
head.writeUInt32LE(36 + question.length, 4);
head.write('WAVEfmt ', 8);
[16, 0x10001, 24000, SECOND_BYTES, 0x100002].forEach((word, at) => head.writeUInt32LE(word, 16 + 4 * at));
head.write('data', 36);
head.writeUInt32LE(question.length, 40);
const wav = Buffer.concat([head, question]);

async function refused(call) {
  try {
    await call;
    report.failures.push('it was not refused');
  } catch (error) {
    if (!error.code) report.failures.push(error.message);
  }
}

if (scene === 'transcribe') {
  const asked = { model, file: await toFile(wav, 'question.wav') };
  const whole = await client.audio.transcriptions.create(asked);
  for await (const event of await client.audio.transcriptions.create({ ...asked, stream: true })) {
    report.events[event.type] = (report.events[event.type] ?? 0) + 1;
    if (event.type === 'transcript.text.done') report.words = event.text;
  }
  if (whole.text !== report.words) report.failures.push(`a stream has other words: ${whole.text}`);
} else {
  const sound = { type: 'input_audio', input_audio: { data: wav.toString('base64'), format: 'wav' } };
  const messages = [{ role: 'user', content: [sound] }];
  const spoken = { modalities: ['text', 'audio'], audio: { voice: 'alloy', format: 'pcm16' } };
  for await (const chunk of await client.chat.completions.create({ model, messages, ...spoken, stream: true })) {
    const audio = chunk.choices[0]?.delta?.audio;
    report.words += audio?.transcript ?? '';
    report.sound_s += Buffer.from(audio?.data ?? '', 'base64').length / SECOND_BYTES;
  }
  const answer = await client.chat.completions.stream({ model, messages }).finalChatCompletion();
  if (!answer.choices[0].message.content) report.failures.push('a text has no words');
  await refused(client.chat.completions.create({ model, messages, n: 2 }));
  await refused(client.responses.create({ model, input: 'hello' }));
}
console.log(JSON.stringify(report));

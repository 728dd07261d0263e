// A browser's client of /ws/chat, for where the sources' own is not at hand: it does what that does.
// It is written for `shims.mjs`, as the example of 004 is read there: no imports, and the page's
// functions are there.

const voice = getRefAudioBase64();
const socket = new WebSocket(`wss://${location.host}/ws/chat`);
let said = '';

socket.onopen = () => {
  const system = [
    { type: 'text', text: 'Speak as this sample does.' },
    { type: 'audio', data: voice },
    { type: 'text', text: 'Answer in a few words.' },
  ];
  socket.send(JSON.stringify({
    messages: [{ role: 'system', content: system }, { role: 'user', content: 'Hello!' }],
    streaming: true,
    generation: { max_new_tokens: 256, temperature: 0.7 },
    tts: { enabled: true, mode: 'audio_assistant', ref_audio_data: voice },
  }));
};

const handlers = {
  prefill_done: (message) => console.log(`Prefill done, ${message.input_tokens} input tokens`),
  chunk: (message) => {
    if (message.text_delta) {
      said += message.text_delta;
      console.log('Streaming:', said);
    }
    if (message.audio_data) playAudio(message.audio_data);
  },
  done: (message) => {
    console.log('Final text:', message.text);
    console.log(`Tokens: ${message.input_tokens} in, ${message.generated_tokens} out`);
    socket.close();
  },
  error: (message) => {
    console.error('Error:', message.error);
    socket.close();
  },
};

socket.onmessage = (event) => {
  const message = JSON.parse(event.data);
  handlers[message.type](message);
};
socket.onerror = () => console.error('WebSocket error');
socket.onclose = () => console.log('Connection closed');

/* The lanes of what was heard, seen and said. */

import { count, many } from "./format.js";
import { lastBefore } from "./data.js";
import { faded, fillBox, FONT, writeFitted } from "./paint.js";
import { drawWave, loudest } from "./waveform.js";

// -- voices --------------------------------------------------------------------------------------

export function waveLane(voice, label, pieces) {
  let gain = null;
  return {
    id: voice,
    label,
    note: "",
    voice,
    height: 76,
    draw({ context, scale, theme, top, height }) {
      gain ??= 0.94 / loudest(pieces);
      const middle = top + height / 2;
      context.fillStyle = faded(theme[voice], 0.35);
      context.fillRect(0, middle - 0.5, scale.width, 1);
      drawWave(context, pieces, scale, {
        middle,
        half: height / 2 - 4,
        colour: theme[voice],
        gain,
      });
    },
    hit: () => null,
  };
}

// -- words ---------------------------------------------------------------------------------------

export function wordsLane(said) {
  const rows = ["user", "model"].filter((voice) => said.some((each) => each.voice === voice));
  const line = 24;
  return {
    id: "words",
    label: "Words",
    note: "",
    height: Math.max(1, rows.length) * line + 8,
    draw({ context, scale, theme, top }) {
      for (const each of said) {
        if (!scale.sees(each.begin, each.end)) continue;
        const y = top + 4 + rows.indexOf(each.voice) * line;
        drawWords(context, scale, each, y, line - 4, theme);
      }
    },
    hit(time, reach, y) {
      const voice = rows[Math.floor((y - 4) / line)];
      const found = said.find(
        (each) => each.voice === voice && time >= each.begin - reach / 4 && time <= each.end,
      );
      if (!found) return null;
      return {
        title: found.voice === "user" ? "The user says" : "The model says",
        lines: [found.text],
        at: found.begin,
        seq: found.seq,
      };
    },
  };
}

function drawWords(context, scale, { voice, begin, end, text }, y, height, theme) {
  const left = scale.x(begin);
  const width = scale.x(end) - left - 1;
  fillBox(context, left, y, width, height, faded(theme[voice], width > 24 ? 0.14 : 0.4), 4);
  if (width <= 24) return;
  const from = Math.max(left, 0);
  context.fillStyle = theme.ink;
  context.font = FONT;
  writeFitted(
    context,
    text.trim().replace(/\s+/g, " "),
    from + 6,
    y + height / 2,
    left + width - from - 10,
  );
}

// -- pictures ------------------------------------------------------------------------------------

export function picturesLane({ pictures }) {
  const images = new Map();
  const inset = 5;
  return {
    id: "video",
    label: "Video",
    note: many(pictures.length, "frame"),
    height: 62,
    changed: () => {},
    draw({ context, scale, theme, top, height }) {
      let free = -Infinity;
      const start = Math.max(0, lastBefore(pictures, scale.begin, (picture) => picture.at) - 1);
      for (let i = start; i < pictures.length && pictures[i].at <= scale.end; i++) {
        const x = scale.x(pictures[i].at);
        context.fillStyle = theme.faint;
        context.fillRect(x, top + height - 4, 1, 4);
        if (x < free) continue;
        const image = this.image(pictures[i]);
        if (!image) continue;
        const wide = ((height - 2 * inset - 2) * image.width) / image.height;
        context.drawImage(image, x, top + inset, wide, height - 2 * inset - 2);
        free = x + wide + 3;
      }
    },
    /* The decoded picture; null while it is being decoded. */
    image(picture) {
      if (picture.jpeg === null) return null;
      const known = images.get(picture.first);
      if (known !== undefined) return known;
      images.set(picture.first, null);
      const image = new Image();
      image.onload = () => {
        images.set(picture.first, image);
        this.changed();
      };
      image.src = `data:image/jpeg;base64,${picture.jpeg}`;
      return null;
    },
    hit(time, reach) {
      const index = lastBefore(pictures, time, (picture) => picture.at);
      const picture = pictures[index];
      if (!picture || (time - picture.at > 2 && time - picture.at > 60 * reach)) return null;
      return {
        title: `Frame ${index + 1} of ${pictures.length}`,
        lines: [
          `${count(picture.bytes)} bytes`,
          ...(picture.jpeg ? [] : ["not kept in this page"]),
        ],
        at: picture.at,
        seq: null,
      };
    },
  };
}

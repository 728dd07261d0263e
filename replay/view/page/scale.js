/* Between the session's clock and pixels: what of the session is in view, and moving that about. */

const SPAN_MIN = 0.25;
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800];
const TICK_PX_MIN = 84;
const MARGIN = 0.01;

export class Scale {
  /** All of a session of `end` seconds is in view at first. */
  constructor(end) {
    this.whole = end * (1 + 2 * MARGIN);
    this.first = -end * MARGIN;
    this.begin = this.first;
    this.span = this.whole;
    this.width = 1;
  }

  get end() {
    return this.begin + this.span;
  }

  /** Pixels a second. */
  get density() {
    return this.width / this.span;
  }

  x(time) {
    return (time - this.begin) * this.density;
  }

  time(x) {
    return this.begin + x / this.density;
  }

  sees(begin, end) {
    return end >= this.begin && begin <= this.end;
  }

  show(begin, span) {
    this.span = Math.min(this.whole, Math.max(Math.min(SPAN_MIN, this.whole), span));
    this.begin = Math.min(this.first + this.whole - this.span, Math.max(this.first, begin));
  }

  /** Zoom by a factor; what is at pixel `x` stays there. */
  zoom(factor, x = this.width / 2) {
    const time = this.time(x);
    this.show(this.begin, this.span / factor);
    this.show(time - x / this.density, this.span);
  }

  pan(pixels) {
    this.show(this.begin + pixels / this.density, this.span);
  }

  fit() {
    this.show(this.first, this.whole);
  }

  /** Bring a time into view, if it is not, a `share` of the width from the left. */
  reveal(time, share = 0.2) {
    if (time < this.begin || time > this.begin + this.span * 0.98)
      this.show(time - share * this.span, this.span);
  }

  /** Round times in view for labels, and how many digits they need. */
  ticks() {
    const step = STEPS.find((each) => each * this.density >= TICK_PX_MIN) ?? STEPS.at(-1);
    const times = [];
    for (let i = Math.max(0, Math.ceil(this.begin / step)); i * step <= this.end; i++)
      times.push(i * step);
    return { step, times, digits: step >= 1 ? 0 : step >= 0.1 ? 1 : 2 };
  }
}

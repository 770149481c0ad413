// A chart of the last minutes: lines or stacked areas, from the oldest point on the left to the present on the right.

import { element } from "/page/server.js";

export const HISTORY_S = 300;

export class Chart {
  /** `series` are {key, words}: the field of a point, and its name for people. The CSS class `key` gives the colour. */
  constructor({ title, series, stacked = false, most = null, format }) {
    Object.assign(this, { title, series, stacked, most, format });
    this.figure = element("figure");
    const caption = element("figcaption", "", `${title} `);
    this.range = element("b");
    caption.append(this.range);
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    const legend = element("p", "legend");
    if (series.length > 1) legend.append(...series.map(({ key, words }) => element("span", key, words)));
    this.figure.append(caption, this.canvas, legend);
  }

  show(points) {
    const known = points.filter((point) => point[this.series[0].key] != null);
    const top = Math.max(0, ...known.map((point) => this.#height(point, this.series.length - 1)));
    this.range.textContent = top > 0 ? `up to ${this.format(top)}` : "";
    this.canvas.setAttribute("aria-label", `${this.title} over the last ${HISTORY_S / 60} minutes: ${this.#inWords(known, top)}`);
    this.#draw(points, this.most ?? top);
  }

  #inWords(known, top) {
    if (!(top > 0)) return "nothing";
    const of = ({ key, words }) => {
      const values = known.map((point) => point[key]);
      return `${words} ${this.format(values.at(-1))} last, ${this.format(Math.max(...values))} at most`;
    };
    return this.series.map(of).join("; ");
  }

  /** Return the height of a series' line: its value, plus the values below it if the chart is stacked. */
  #height(point, index) {
    if (this.stacked) return this.series.slice(0, index + 1).reduce((sum, { key }) => sum + point[key], 0);
    return index === this.series.length - 1
      ? Math.max(...this.series.map(({ key }) => point[key])) : point[this.series[index].key];
  }

  #draw(points, top) {
    const scale = devicePixelRatio;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight].map((size) => Math.round(size * scale));
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    if (!(top > 0)) return;
    const now = points.at(-1).time;
    const x = (point) => width - 2 * scale - ((now - point.time) / HISTORY_S) * (width - 4 * scale);
    const y = (value) => height - scale - (value / top) * (height - 3 * scale);
    const style = getComputedStyle(this.canvas);
    for (const index of [...this.series.keys()].reverse()) {
      const { key } = this.series[index];
      const value = this.stacked ? (point) => this.#height(point, index) : (point) => point[key];
      pen.strokeStyle = pen.fillStyle = style.getPropertyValue(`--${key}`);
      for (const run of unbroken(points, key)) {
        if (this.stacked) area(pen, run, x, (point) => y(value(point)), y(0), scale);
        else line(pen, run, x, (point) => y(value(point)), scale);
      }
    }
  }
}

/** Return the points as runs in which the value is known. */
function unbroken(points, key) {
  const runs = [[]];
  for (const point of points) {
    if (point[key] != null) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}

function line(pen, run, x, y, scale) {
  pen.lineWidth = 1.5 * scale;
  pen.beginPath();
  for (const point of run) pen.lineTo(x(point), y(point));
  pen.stroke();
  if (run.length === 1) pen.fillRect(x(run[0]) - scale, y(run[0]) - scale, 2 * scale, 2 * scale); // a single point has no line
}

function area(pen, run, x, y, ground, scale) {
  pen.beginPath();
  pen.moveTo(x(run[0]) - scale, ground); // widen a single point, to make it visible
  for (const point of run) pen.lineTo(x(point), y(point));
  pen.lineTo(x(run.at(-1)) + scale, ground);
  pen.fill();
}

// ---------------------------------------------------------------------------
// Saturation

const CURVE_HEIGHT = 300;
const CURVE_TOP = 10;
const CURVE_LEFT = 44;
const CURVE_RIGHT = 20;
const WIDEST_CURVES = 900;
const STEP_SPACE = 64;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

/** Draws a curve for each layer, over training steps. */
function drawSaturation(place) {
  const curves = readCurves();
  const scale = curveScale(Math.min(place.clientWidth, WIDEST_CURVES));
  const image = draw("svg", {
    width: scale.width,
    height: CURVE_HEIGHT + 52,
    role: "img",
    "aria-label": "Saturation over training steps, a curve for each layer",
  });
  drawAxes(image, scale);
  const legend = make("ul", { class: "curves" });
  curves.forEach((curve, number) => {
    drawCurve(image, curve, number, scale);
    legend.append(curveName(curve, number));
  });
  place.replaceChildren(make("figure", {}, legend, image), saturationNumbers());
}

/** Returns { name, points } for each layer; points are [step, value], by step. */
function readCurves() {
  const curves = new Map();
  for (const { key, step, value } of content.saturation) {
    const name = layerOfKey(key).name;
    curves.set(name, [...(curves.get(name) ?? []), [step, value]]);
  }
  return [...curves].map(([name, points]) => ({
    name,
    points: points.sort((a, b) => a[0] - b[0]),
  }));
}

function curveScale(width) {
  const steps = content.saturation.map((point) => point.step);
  const values = content.saturation.map((point) => point.value);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [lowest, highest] = [Math.min(0, ...values), Math.max(1, ...values)];
  const room = width - CURVE_LEFT - CURVE_RIGHT;
  return {
    width,
    steps,
    lowest,
    x: (step) => CURVE_LEFT + (room * (step - first)) / (last - first || 1),
    y: (value) => CURVE_TOP + CURVE_HEIGHT * (1 - (value - lowest) / (highest - lowest)),
  };
}

function drawAxes(image, { width, steps, lowest, x, y }) {
  for (const value of new Set([lowest, 0, 0.25, 0.5, 0.75, 1])) {
    const at = y(value);
    const ends = { x1: CURVE_LEFT, x2: width - CURVE_RIGHT, y1: at, y2: at };
    image.append(draw("line", { class: "grid", ...ends }));
    const place = { x: CURVE_LEFT - 6, y: at + 4, "text-anchor": "end" };
    image.append(label(formatNumber(value), place));
  }
  for (const step of labelledSteps(steps, x)) {
    const place = { x: x(step), y: CURVE_HEIGHT + 28, "text-anchor": "middle" };
    image.append(label(formatCount(step), place));
  }
  const middle = (CURVE_LEFT + width - CURVE_RIGHT) / 2;
  image.append(
    label("training step", { x: middle, y: CURVE_HEIGHT + 46, "text-anchor": "middle" }),
  );
}

/** Returns the steps that have room for a label below the curves. */
function labelledSteps(steps, x) {
  const labelled = [];
  for (const step of [...new Set(steps)].sort((a, b) => a - b)) {
    if (!labelled.length || x(step) - x(labelled[labelled.length - 1]) >= STEP_SPACE) {
      labelled.push(step);
    }
  }
  return labelled;
}

/** Returns how curve number n differs from others: in colour, then in dash. */
function curveStyle(number) {
  const dash = DASHES[Math.floor(number / NUM_HUES) % DASHES.length];
  return { class: "curve", data: { hue: String(number % NUM_HUES) }, "stroke-dasharray": dash };
}

function drawCurve(image, { name, points }, number, { x, y }) {
  const places = points.map(([step, value]) => `${x(step)},${y(value)}`);
  image.append(draw("polyline", { ...curveStyle(number), points: places.join(" ") }));
  for (const [step, value] of points) {
    const text = `${name}, step ${formatCount(step)}: ${formatNumber(value)}`;
    image.append(curvePoint(number, x(step), y(value), text));
  }
}

/** Returns a point; curves differ in its shape too. */
function curvePoint(number, x, y, text) {
  const shapes = [
    `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
    `M${x - 4},${y - 4}h8v8h-8z`,
    `M${x},${y - 5}l5,9h-10z`,
    `M${x},${y - 5}l5,5l-5,5l-5,-5z`,
  ];
  const hue = String(number % NUM_HUES);
  const d = shapes[number % shapes.length];
  return draw("path", { class: "point", data: { hue }, d }, tooltip(text));
}

function curveName({ name }, number) {
  const line = draw("line", { ...curveStyle(number), x1: 1, x2: 33, y1: 7, y2: 7 });
  const point = curvePoint(number, 17, 7, name);
  const sample = draw("svg", { width: 34, height: 14, "aria-hidden": "true" }, line, point);
  return make("li", {}, sample, ` ${name}`);
}

function saturationNumbers() {
  const rows = content.saturation.map(({ key, step, value }) => {
    return [layerOfKey(key).name, formatCount(step), formatNumber(value, 3)];
  });
  const table = makeTable(["layer", "step", "saturation"], rows, [1, 2]);
  return make("details", {}, make("summary", {}, "Numbers"), table);
}

// ---------------------------------------------------------------------------
// Tables: classes by expert, ablation, agreement

const BARS_AT_ONCE = 20;
const COLUMNS_AT_ONCE = 24;
const LARGEST_LIFT = 4;
const SIGNIFICANT = 0.05;
const HIGHLY_SIGNIFICANT = 0.01;

function layerOfKey([stackName, number]) {
  return models[0].byStack[stackName][number];
}

/** Returns a button that chooses an expert of the first model. */
function expertButton(layer, expert, text = "") {
  const options = {
    type: "button",
    class: "plain",
    "aria-label": text.trim() || `Expert ${expert + 1}`,
    on: { click: () => chooseInLayer(models[0], layer, expert) },
  };
  return make("button", options, expertChip(layer, expert), text);
}

function buildClasses() {
  const place = document.getElementById("class-table");
  if (!place) {
    return;
  }
  const select = make("select", { id: "class-layer", on: { change: () => show() } });
  content.classes.forEach((table, i) =>
    select.append(make("option", { value: i }, layerOfKey(table.key).name)),
  );
  const all = make("input", { type: "checkbox", on: { change: () => show() } });
  const allLabel = make("label.control", all, " all experts");
  const result = make("div");
  const show = () => {
    const table = content.classes[Number(select.value)];
    allLabel.hidden = layerOfKey(table.key).num_experts <= COLUMNS_AT_ONCE;
    result.replaceChildren(classTable(table, all.checked));
  };
  const choice = make("label.control", "Layer ", select);
  place.append(make("div.controls", choice, allLabel), result, liftScale());
  show();
}

/** Returns the experts that are shown: all, or those of the most significant cells. */
function classColumns(table, showAll) {
  const experts = layerOfKey(table.key).load.map((_, expert) => expert);
  if (showAll || experts.length <= COLUMNS_AT_ONCE) {
    return experts;
  }
  const least = (expert) => Math.min(...table.rows.map((row) => row.p_values[expert] ?? 1));
  const most = (expert) => Math.max(...table.rows.map((row) => row.lifts[expert] ?? 0));
  experts.sort((a, b) => least(a) - least(b) || most(b) - most(a) || a - b);
  return experts.slice(0, COLUMNS_AT_ONCE).sort((a, b) => a - b);
}

function classTable(table, showAll) {
  const layer = layerOfKey(table.key);
  const columns = classColumns(table, showAll);
  const head = make(
    "tr",
    make("th", { scope: "col" }, "class"),
    make("th.number", { scope: "col" }, "tokens"),
  );
  for (const expert of columns) {
    const button = expertButton(layer, expert);
    head.append(make("th.cell", { scope: "col" }, button));
  }
  head.append(make("th.number", { scope: "col" }, "entropy (nats)"));

  const body = make("tbody");
  for (const row of table.rows) {
    const line = make(
      "tr",
      make("th", { scope: "row" }, row.name),
      make("td.number", formatCount(row.num_tokens)),
    );
    columns.forEach((expert) => line.append(classCell(row, expert)));
    line.append(make("td.number", row.entropy ? formatEstimate(row.entropy) : "–"));
    body.append(line);
  }
  const grid = make("table.classes", make("thead", head), body);
  const left = layer.num_experts - columns.length;
  const rest = left
    ? make("p.soft", `${left} experts without more significant cells are left out.`)
    : null;
  return make("div", scrollable("Class by expert", grid), rest);
}

function formatEstimate(estimate) {
  return `${formatNumber(estimate.value)} (${formatNumber(estimate.low)} to ${formatNumber(estimate.high)})`;
}

function classCell(row, expert) {
  const lift = row.lifts[expert];
  const p = row.p_values[expert];
  const isSignificant = p !== null && p <= SIGNIFICANT && lift !== null;
  const dots = [SIGNIFICANT, HIGHLY_SIGNIFICANT].filter((limit) => p !== null && p <= limit);
  const share = formatPercent(row.shares[expert]);
  const facts = [`${share} of its tokens`, `lift ${formatNumber(lift)}`, `p ${formatP(p)}`];
  const title = `${row.name}, expert ${expert + 1}: ${facts.join(", ")}`;
  const marks = make("span.dots", "•".repeat(dots.length));
  const cell = make("td.cell", { title }, share, marks);
  if (isSignificant) {
    paintLift(cell, lift);
  }
  return cell;
}

function formatP(p) {
  if (p === null) {
    return "not known";
  }
  return p < 0.001 ? "< 0.001" : `= ${p.toFixed(3)}`;
}

/** Colours a cell: orange above 1, blue below; deepest at 4 and at a quarter. */
function paintLift(element, lift) {
  const depth = Math.min(1, Math.abs(Math.log(Math.max(lift, 1e-9))) / Math.log(LARGEST_LIFT));
  element.classList.add(lift >= 1 ? "more" : "less");
  element.style.setProperty("--depth", depth.toFixed(2));
}

function liftScale() {
  const scale = make("p.scale", make("span.soft", "lift "));
  for (const lift of [0.25, 0.5, 1, 2, 4]) {
    const sample = make("span.cell.sample", `${lift} ×`);
    if (lift !== 1) {
      paintLift(sample, lift);
    }
    scale.append(sample);
  }
  return scale;
}

// ---------------------------------------------------------------------------
// Ablation

function buildAblation() {
  const place = document.getElementById("ablation-bars");
  if (!place) {
    return;
  }
  const bars = content.ablation;
  const known = bars
    .flatMap((bar) => [bar.effect, bar.low, bar.high])
    .filter((value) => value !== null);
  const low = Math.min(0, ...known);
  const high = Math.max(0, ...known);
  const list = make("ol.bars");
  const button = make("button", { type: "button" });
  const show = (number) => {
    bars
      .slice(list.children.length, number)
      .forEach((bar) => list.append(ablationBar(bar, low, high)));
    button.hidden = list.children.length >= bars.length;
    button.textContent = `Show all ${bars.length}`;
  };
  button.addEventListener("click", () => show(bars.length));
  place.append(list, make("p", button));
  show(BARS_AT_ONCE);
}

function ablationBar(bar, low, high) {
  const layer = layerOfKey([bar.stack, bar.layer]);
  const at = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  const edit = bar.edit ? ` · ${bar.edit}` : "";
  const name = expertButton(layer, bar.expert, ` ${layer.name}, expert ${bar.expert + 1}${edit}`);
  const image = draw("svg.effect", { height: 22, width: "100%", "aria-hidden": "true" });
  if (bar.effect !== null) {
    const left = Math.min(0, bar.effect);
    const width = `${(100 * Math.abs(bar.effect)) / (high - low || 1)}%`;
    image.append(
      draw("rect", {
        class: bar.effect >= 0 ? "loss" : "gain",
        x: at(left),
        y: 4,
        width,
        height: 14,
      }),
    );
  }
  image.append(draw("line.zero", { x1: at(0), x2: at(0), y1: 0, y2: 22 }));
  if (bar.low !== null && bar.high !== null) {
    image.append(draw("line.whisker", { x1: at(bar.low), x2: at(bar.high), y1: 11, y2: 11 }));
    [bar.low, bar.high].forEach((end) =>
      image.append(draw("line.whisker", { x1: at(end), x2: at(end), y1: 6, y2: 16 })),
    );
  }
  const sign = (value) =>
    value === null ? "–" : `${value > 0 ? "+" : ""}${formatNumber(value, 4)}`;
  const numbers = make(
    "span.numbers",
    `${sign(bar.effect)} (${sign(bar.low)} to ${sign(bar.high)})`,
  );
  const row = make("li", name, image, numbers, make("span.verdict", bar.verdict));
  if (bar.lost) {
    const answers = bar.answers.map((text) => make("li", text));
    const summary = make("summary", `${formatCount(bar.lost)} right answers are lost, such as`);
    row.append(make("details", summary, make("ul", ...answers)));
  }
  return row;
}

// ---------------------------------------------------------------------------
// Two models

function buildAgreement() {
  const place = document.getElementById("agreement-table");
  if (!place) {
    return;
  }
  const rows = content.agreement.map((row) => [
    `${row.stack} ${row.layer + 1}`,
    `${formatPercent(row.same / Math.max(1, row.num_tokens))}`,
    formatPercent(row.by_chance),
    `${formatCount(row.same)} of ${formatCount(row.num_tokens)}`,
  ]);
  place.append(makeTable(["layer", "the same expert", "by chance", "tokens"], rows, [1, 2, 3]));
}

// ---------------------------------------------------------------------------
// Start

function scrollBehaviour() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
}

/** Says how much of the trace is shown token by token. */
function describeShown() {
  const shown = content.examples.length;
  const total = content.num_examples;
  document.getElementById("shown").textContent =
    shown < total
      ? `${formatCount(shown)} of ${plural(total, "example")} are shown here, evenly chosen, as no more fit on the page. Tables and totals count all.`
      : `All ${plural(total, "example")} of the trace.`;
}

function setColours(colours) {
  state.colours = colours;
  for (const pane of panes) {
    const layer = layerOf(pane);
    if (layer && colours === "one") {
      pane.expert ??= busiest(layer);
      state.active ??= pane;
    }
    paint(pane);
    markButtons(pane);
  }
  renderExpert();
  refreshCharts();
}

function clearChoice() {
  panes.forEach((pane) => {
    pane.expert = null;
    paint(pane);
    markButtons(pane);
  });
  state.active = null;
  renderExpert();
  refreshCharts();
}

function stepExample(step) {
  const example = state.example + step;
  if (example >= 0 && example < content.examples.length) {
    showExample(example);
  }
}

function buildControls() {
  document.getElementById("previous").addEventListener("click", () => stepExample(-1));
  document.getElementById("next").addEventListener("click", () => stepExample(1));
  const input = document.getElementById("example");
  input.addEventListener("change", () => {
    const number = Math.round(Number(input.value) || 1);
    showExample(Math.min(Math.max(1, number), content.examples.length) - 1);
  });

  document.querySelectorAll("input[name=colours]").forEach((radio) => {
    radio.checked = radio.value === state.colours;
    radio.addEventListener("change", () => setColours(radio.value));
  });
  const numbers = document.getElementById("numbers");
  const showNumbers = () =>
    document.getElementById("stacks").classList.toggle("numbered", numbers.checked);
  numbers.addEventListener("change", showNumbers);
  showNumbers();
  document.getElementById("differences")?.addEventListener("change", () => panes.forEach(paint));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      clearChoice();
    }
  });
}

/** Links inside the page scroll by themselves: in a frame of a notebook an address would not. */
function buildLinks() {
  document.querySelectorAll("nav a").forEach((link) => {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const panel = document.querySelector(link.getAttribute("href"));
      panel.scrollIntoView({ behavior: scrollBehaviour() });
      panel.tabIndex = -1;
      panel.focus({ preventScroll: true });
    });
  });
}

function redrawOnResize() {
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth !== width) {
      width = document.documentElement.clientWidth;
      refreshCharts();
    }
  });
}

function start() {
  const experts = models.flatMap((model) => model.layers.map((layer) => layer.num_experts));
  state.colours = Math.max(...experts) > MANY_EXPERTS ? "one" : "all";
  describeShown();
  buildStacks();
  buildControls();
  showExample(0);
  Object.keys(stacks)
    .filter((name) => numLayers(name) && panesOf(name).length)
    .forEach((name) => showLayer(name, 0));
  setColours(state.colours);
  buildCharts();
  buildClasses();
  buildAblation();
  buildAgreement();
  buildLinks();
  redrawOnResize();
}

start();

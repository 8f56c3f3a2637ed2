const dark = window.matchMedia("(prefers-color-scheme: dark)");

// Replaces every "var(--name)" in a figure by the colour that it has now.
function resolve(value, style) {
  if (typeof value === "string") return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  if (Array.isArray(value)) return value.map(item => resolve(item, style));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, style)]));
  return value;
}

function merge(base, extra) {
  const out = { ...base };
  for (const [key, value] of Object.entries(extra))
    out[key] = value && typeof value === "object" && !Array.isArray(value) ? merge(base[key] || {}, value) : value;
  return out;
}

const AXIS = {
  gridcolor: "var(--grid)", zerolinecolor: "var(--grid)", linecolor: "var(--line)", tickcolor: "var(--line)",
  automargin: true, title: { font: { size: 13, color: "var(--soft)" }, standoff: 10 }, tickfont: { size: 12, color: "var(--soft)" },
};
const LAYOUT = {
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 14, b: 8 },
  font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "var(--ink)" },
  hoverlabel: { bgcolor: "var(--paper)", bordercolor: "var(--line)", font: { color: "var(--ink)", size: 13 } },
  legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12.5, color: "var(--soft)" } },
  bargap: 0.3, hovermode: "closest", dragmode: window.innerWidth > 760 ? "zoom" : false,
};

function draw() {
  const style = getComputedStyle(document.documentElement);
  FIGURES.forEach((figure, number) => {
    const axes = Object.fromEntries(Object.keys({ xaxis: 0, yaxis: 0, ...figure.layout })
      .filter(name => /^[xy]axis\d*$/.test(name)).map(name => [name, AXIS]));
    const layout = merge(merge(LAYOUT, axes), figure.layout);
    Plotly.react("plot-" + number, resolve(figure.data, style), resolve(layout, style), { displayModeBar: false, responsive: false });
  });
  paint();
}

// The timeline: a canvas, for a step may hold a hundred thousand operations. Each lane is sorted by start.
const canvas = document.getElementById("lanes"), tip = document.getElementById("tip");
const LEFT = 64, LANE = 20, THIN = 7, GAP = 5, AXIS_HEIGHT = 26;
const NAMES = { F: "forward", B: "backward", I: "backward for the input", W: "gradient of the weights" };
let shown = 0, from = 0, to = 1;

function lanes() {
  const timeline = TIMELINES[shown];
  let y = 4;
  return timeline.lanes.map(lane => { const height = lane.thin ? THIN : LANE, at = y; y += height + (lane.thin ? GAP + 3 : 2); return { ...lane, y: at, height }; });
}

function paint() {
  if (!canvas || !TIMELINES.length) return;
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue("--" + name).trim();
  const timeline = TIMELINES[shown], rows = lanes(), last = rows[rows.length - 1];
  const width = canvas.parentElement.clientWidth, height = last.y + last.height + AXIS_HEIGHT + 4, ratio = window.devicePixelRatio || 1;
  canvas.style.height = height + "px"; canvas.width = width * ratio; canvas.height = height * ratio;
  const pen = canvas.getContext("2d"); pen.scale(ratio, ratio); pen.font = "12px " + getComputedStyle(document.body).fontFamily;
  const colors = { F: color("op-f"), B: color("op-b"), I: color("op-i"), W: color("op-w"), T: color("series-4") };
  const scale = (width - LEFT - 6) / (to - from), x = second => LEFT + (second - from) * scale;
  pen.textBaseline = "middle";
  for (const lane of rows) {
    pen.fillStyle = color("soft");
    if (!lane.thin) pen.fillText(lane.name, 0, lane.y + lane.height / 2, LEFT - 6);
    pen.fillStyle = color("wait"); pen.fillRect(LEFT, lane.y, width - LEFT - 6, lane.height);
  }
  pen.save(); pen.beginPath(); pen.rect(LEFT, 0, width - LEFT - 6, height); pen.clip();
  for (const lane of rows) {
    let end = -1, kind = "";
    for (const [start, stop, letter, micro, chunk] of lane.ops) {
      if (stop < from || start > to) continue;
      const a = x(start), b = x(stop);
      if (b < end + 0.4 && letter === kind) continue;     // several to a pixel: one is enough
      end = b; kind = letter;
      pen.fillStyle = colors[letter] || colors.T;
      pen.globalAlpha = lane.thin ? 1 : (chunk % 2 ? 0.72 : 1);
      pen.fillRect(a, lane.y, Math.max(b - a - (b - a > 3 ? 0.8 : 0), 0.5), lane.height);
      pen.globalAlpha = 1;
      if (!lane.thin && b - a > 17) { pen.fillStyle = color("paper"); pen.textAlign = "center"; pen.fillText(micro, (Math.max(a, LEFT) + Math.min(b, width)) / 2, lane.y + lane.height / 2 + 0.5, b - a - 4); pen.textAlign = "start"; }
    }
  }
  pen.restore();
  const rough = (to - from) / Math.max(2, width / 130), power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map(k => k * power).find(v => v >= rough);
  pen.fillStyle = color("soft"); pen.textAlign = "center";
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
    pen.fillRect(x(tick), height - AXIS_HEIGHT, 1, 5);
    pen.fillText(time(tick), Math.min(Math.max(x(tick), LEFT + 12), width - 30), height - AXIS_HEIGHT + 15);
  }
  pen.textAlign = "start";
}

function time(seconds) {
  const size = Math.max(to - from, Math.abs(seconds));
  return size >= 2 ? +seconds.toFixed(2) + " s" : size >= 2e-3 ? +(seconds * 1e3).toFixed(2) + " ms" : +(seconds * 1e6).toFixed(1) + " µs";
}

function zoom(factor, at) {
  const whole = TIMELINES[shown].seconds, middle = at === undefined ? (from + to) / 2 : at;
  const span = Math.min(whole, Math.max(whole * 1e-5, (to - from) * factor)), share = (middle - from) / (to - from);
  from = Math.min(Math.max(0, middle - span * share), whole - span); to = from + span; paint();
}

function pan(by) {
  const whole = TIMELINES[shown].seconds, span = to - from;
  from = Math.min(Math.max(0, from + by), whole - span); to = from + span; paint();
}

function whole() { from = 0; to = TIMELINES[shown].seconds; paint(); }

// Begins with what can be told apart: about 150 operations a lane.
function choose(number) {
  shown = number; from = 0;
  const most = Math.max(...TIMELINES[number].lanes.filter(lane => !lane.thin).map(lane => lane.ops.length));
  to = TIMELINES[number].seconds * Math.min(1, 150 / Math.max(1, most)); paint();
}

if (canvas && TIMELINES.length) {
  const select = document.getElementById("which");
  TIMELINES.forEach((timeline, number) => select.add(new Option(timeline.name, number)));
  select.onchange = () => choose(+select.value);
  document.getElementById("closer").onclick = () => zoom(0.5);
  document.getElementById("farther").onclick = () => zoom(2);
  document.getElementById("whole").onclick = whole;
  const seconds = event => from + (event.offsetX - LEFT) / (canvas.clientWidth - LEFT - 6) * (to - from);
  canvas.addEventListener("wheel", event => { if (event.ctrlKey || event.shiftKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, seconds(event)); } }, { passive: false });
  canvas.addEventListener("dblclick", event => zoom(0.4, seconds(event)));
  canvas.addEventListener("keydown", event => {
    const act = { ArrowLeft: () => pan(-(to - from) / 8), ArrowRight: () => pan((to - from) / 8), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), "0": whole }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = event.clientX; canvas.classList.add("held"); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; canvas.classList.remove("held"); });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("pointermove", event => {
    if (held !== null) { pan((held - event.clientX) / (canvas.clientWidth - LEFT - 6) * (to - from)); held = event.clientX; tip.style.display = "none"; return; }
    const at = seconds(event), lane = lanes().find(row => event.offsetY >= row.y && event.offsetY <= row.y + row.height + 1);
    const hit = lane && lane.ops.find(([start, stop]) => start <= at && at <= stop);
    if (!lane || at < from) { tip.style.display = "none"; return; }
    tip.textContent = hit ? (NAMES[hit[2]] ? `${lane.name}: ${NAMES[hit[2]]}\nmicro-batch ${hit[3]}, part ${hit[4]} of the model` : `${lane.name}: ${hit[3]}`) + `\n${time(hit[1] - hit[0])}, from ${time(hit[0])}` : `${lane.name}: nothing`;
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 300) + "px"; tip.style.top = event.clientY + 14 + "px";
  });
  window.addEventListener("resize", paint);
  choose(0);
}
draw();
// A plot follows its place, however that came to be narrower: a window, a print, a column.
const follow = new ResizeObserver(changes => changes.forEach(change => Plotly.Plots.resize(change.target)));
document.querySelectorAll(".plot").forEach(plot => follow.observe(plot));
dark.addEventListener("change", draw);

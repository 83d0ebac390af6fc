// Line charts as SVG. A chart is drawn at the width of its element, and again when that width changes. The pointer, or
// the arrow keys when the chart has the focus, move a cursor that shows the values.

const MARGIN = { left: 46, right: 24, top: 8, bottom: 38 };

// chart: { series: [{ name, color, points: [[x, y]], bounds: [[lo, hi]] }], xs: [x], x, y: { label, from, to, ticks,
//          text }, isLog, height, marks, ideal }
function drawChart(parent, chart, label) {
  const holder = element("div");
  parent.append(holder);
  let at = null;
  const draw = () => {
    const width = Math.max(240, holder.clientWidth);
    const [right, bottom] = [width - MARGIN.right, chart.height - MARGIN.bottom];
    const along = (value) => (chart.isLog ? Math.log10(value) : value);
    const [first, last] = [along(chart.x.from), along(chart.x.to)];
    const x = (value) => MARGIN.left + ((along(value) - first) / (last - first || 1)) * (right - MARGIN.left);
    const y = (value) => bottom - ((value - chart.y.from) / (chart.y.to - chart.y.from || 1)) * (bottom - MARGIN.top);
    const root = shape("svg", { viewBox: `0 0 ${width} ${chart.height}`, height: chart.height, tabindex: 0, role: "img", "aria-label": label });
    for (const tick of chart.y.ticks) {
      root.append(shape("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick) }));
      root.append(shape("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, chart.y.text(tick)));
    }
    let free = -Infinity;
    for (const tick of chart.x.ticks) {
      root.append(shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: MARGIN.top, y2: bottom }));
      const text = chart.x.text(tick);
      if (x(tick) - 3.6 * text.length < free) continue;
      free = x(tick) + 3.6 * text.length + 8;
      root.append(shape("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, text));
    }
    root.append(shape("text", { x: (MARGIN.left + right) / 2, y: chart.height - 4, "text-anchor": "middle" }, chart.x.label));
    if (chart.ideal) {
      root.append(shape("line", { class: "ideal", x1: x(chart.x.from), y1: y(chart.y.from), x2: x(chart.x.to), y2: y(chart.y.to) }));
    }
    for (const series of chart.series.filter((own) => !own.isHidden)) {
      const group = shape("g", { class: `s${series.color % COLORS}` });
      if (series.bounds) {
        const upper = series.points.map(([px], row) => `${x(px)},${y(series.bounds[row][1])}`);
        const lower = series.points.map(([px], row) => `${x(px)},${y(series.bounds[row][0])}`);
        group.append(shape("polygon", { class: "band", points: [...upper, ...lower.reverse()].join(" ") }));
      }
      group.append(shape("polyline", { class: "curve", points: series.points.map(([px, py]) => `${x(px)},${y(py)}`).join(" ") }));
      if (series.points.length < 30 && chart.marks !== false) {
        for (const [px, py] of series.points) group.append(shape("circle", { class: "dot", cx: x(px), cy: y(py), r: 3 }));
      }
      root.append(group);
    }
    const cursor = shape("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    root.append(cursor);
    const show = (row, clientX, clientY) => {
      at = Math.max(0, Math.min(chart.xs.length - 1, row));
      const place = x(chart.xs[at]);
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, place);
      cursor.setAttribute("visibility", "visible");
      const box = root.getBoundingClientRect();
      showTip(clientX ?? box.left + place, clientY ?? box.top + 20, [chart.x.tip(chart.xs[at]), ...chart.tip(chart.xs[at])]);
    };
    const hide = () => {
      cursor.setAttribute("visibility", "hidden");
      hideTip();
    };
    const move = (event) => {
      const left = event.clientX - root.getBoundingClientRect().left;
      const distances = chart.xs.map((value) => Math.abs(x(value) - left));
      show(distances.indexOf(Math.min(...distances)), event.clientX, event.clientY);
    };
    const step = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (by === undefined) return;
      event.preventDefault();
      show(at === null ? 0 : at + by);
    };
    add(root, { onpointermove: move, onpointerleave: hide, onkeydown: step, onblur: hide }, []);
    holder.replaceChildren(root);
  };
  new ResizeObserver(draw).observe(holder);
  draw();
  return draw;
}

// Names with colours. Clicking a name hides its line.
function drawLegend(parent, series, redraw) {
  const entry = (own) => {
    const box = element("input", { type: "checkbox", checked: true, onchange: () => { own.isHidden = !box.checked; redraw(); } });
    return element("label", {}, box, element("span", { class: `swatch s${own.color % COLORS}` }), own.name);
  };
  parent.append(element("div", { class: "controls" }, series.map(entry)));
}

function valueAt(series, x, text) {
  const row = series.points.findIndex((point) => point[0] === x);
  if (row < 0) return [];
  const bounds = series.bounds ? ` (${text(series.bounds[row][0])} to ${text(series.bounds[row][1])})` : "";
  return [`${series.name}: ${text(series.points[row][1])}${bounds}`];
}

const percentTicks = [0, 20, 40, 60, 80, 100];

function drawErrorCurve(parent) {
  const series = data.systems.map((system, color) => ({
    name: system.name,
    color,
    points: data.curve_km.map((km, at) => [km, system.percent[at]]),
    bounds: data.curve_km.map((_, at) => [system.lo[at], system.hi[at]]),
  }));
  const percent = (value) => value.toFixed(1);
  const chart = {
    series,
    xs: data.curve_km,
    x: { label: "distance, km", from: data.curve_km[0], to: data.curve_km[data.curve_km.length - 1], ticks: [0.1, 1, 10, 100, 1000, 10000], text: count, tip: (km) => `% within ${shortNumber(km)} km` },
    y: { from: 0, to: 100, ticks: percentTicks, text: (value) => `${value} %` },
    isLog: true,
    marks: false,
    height: 380,
    tip: (km) => series.filter((own) => !own.isHidden).flatMap((own) => valueAt(own, km, percent)),
  };
  const legend = element("div");
  parent.append(legend);
  drawLegend(legend, series, drawChart(parent, chart, "Share of photos within each distance; arrow keys move the cursor"));
}

function drawCalibration(parent) {
  const series = data.calibration.map((own) => ({
    name: data.runs[own.run].name,
    color: own.run,
    points: own.rows.map((row) => [100 * row.level, 100 * row.share]),
    bounds: own.rows.map((row) => [100 * row.lo, 100 * row.hi]),
  }));
  const percent = (value) => value.toFixed(1);
  const xs = [...new Set(series.flatMap((own) => own.points.map((point) => point[0])))].sort((a, b) => a - b);
  const axis = { from: 0, to: 100, ticks: percentTicks, text: (value) => `${value} %` };
  const chart = {
    series,
    xs,
    x: { ...axis, label: "probability of the radius", tip: (level) => `% within the radius of ${shortNumber(level)} %` },
    y: axis,
    height: 360,
    ideal: true,
    tip: (level) => series.flatMap((own) => valueAt(own, level, percent)),
  };
  drawChart(parent, chart, "Share of truths within the radius, for each probability; arrow keys move the cursor");
}

function niceTicks(from, to, wanted) {
  const rough = (to - from) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to + step / 1e6; tick += step) ticks.push(tick);
  return ticks;
}

function drawTag(parent, tag) {
  const series = data.training
    .filter((own) => own.curves[tag])
    .map((own) => ({ name: data.runs[own.run].name, color: own.run, points: own.curves[tag].filter((point) => point[1] !== null) }))
    .filter((own) => own.points.length > 0);
  const points = series.flatMap((own) => own.points);
  if (points.length === 0) return;
  const [xs, ys] = [0, 1].map((part) => points.map((point) => point[part]));
  const [low, high] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
  const pad = high > low ? (high - low) * 0.06 : Math.abs(high) / 2 || 1;
  const y = { from: low >= 0 ? Math.max(0, low - pad) : low - pad, to: high + pad };
  const [first, last] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  const x = { from: first === last ? first - 1 : first, to: last };
  const chart = {
    series,
    xs: [...new Set(xs)].sort((a, b) => a - b),
    x: { ...x, label: "step", ticks: niceTicks(x.from, x.to, 4), text: count, tip: (step) => `step ${count(step)}` },
    y: { ...y, ticks: niceTicks(y.from, y.to, 4), text: shortNumber },
    marks: points.length < 8,
    height: 190,
    tip: (step) => series.flatMap((own) => valueAt(own, step, shortNumber)),
  };
  const panel = element("div", {}, element("h3", {}, tag));
  parent.append(panel);
  drawChart(panel, chart, `${tag} over training steps; arrow keys move the cursor`);
}

function drawTraining(parent) {
  const tags = [...new Set(data.training.flatMap((own) => Object.keys(own.curves)))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const isMain = (tag) => !tag.startsWith("train/");
  const [main, more] = [element("div", { class: "panels" }), element("div", { class: "panels" })];
  if (data.training.length > 1) {
    const name = (own) => element("span", {}, element("span", { class: `swatch s${own.run % COLORS}` }), ` ${data.runs[own.run].name}`);
    parent.append(element("div", { class: "controls" }, data.training.map(name)));
  }
  parent.append(main);
  const details = element("details", {}, element("summary", {}, "Learning rate, gradient norm, speed"), more);
  if (!tags.every(isMain)) parent.append(details);
  tags.forEach((tag) => drawTag(isMain(tag) ? main : more, tag));
}

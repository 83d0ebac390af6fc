// What all parts of a page use: the outlines of land, elements, formats, colours, distances, the tooltip. Text from data
// is only ever set as text, never as HTML.

const land = JSON.parse(document.getElementById("land").textContent);

const EARTH_RADIUS_KM = 6371.0088;
const COLORS = 8;

function add(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat());
  return node;
}
const element = (name, attributes = {}, ...children) => add(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) =>
  add(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const host = (id) => document.getElementById(id);

const radians = (degrees) => (degrees * Math.PI) / 180;
const degrees = (angle) => (angle * 180) / Math.PI;

function distanceKm([latA, lonA], [latB, lonB]) {
  const north = Math.sin(radians(latB - latA) / 2);
  const east = Math.sin(radians(lonB - lonA) / 2);
  const square = north * north + Math.cos(radians(latA)) * Math.cos(radians(latB)) * east * east;
  return 2 * EARTH_RADIUS_KM * Math.asin(Math.min(1, Math.sqrt(square)));
}

// Points along the great circle between two places, as [lat, lon] with longitudes that do not jump at ±180°.
function arc(from, to) {
  const vector = ([lat, lon]) => {
    const [north, east] = [radians(lat), radians(lon)];
    return [Math.cos(north) * Math.cos(east), Math.cos(north) * Math.sin(east), Math.sin(north)];
  };
  const [start, end] = [vector(from), vector(to)];
  const angle = distanceKm(from, to) / EARTH_RADIUS_KM;
  const steps = Math.max(1, Math.ceil(angle / 0.035));
  const points = [from];
  for (let step = 1; step <= steps; step += 1) {
    const passed = step / steps;
    const weights = angle < 1e-9 ? [1 - passed, passed] : [Math.sin((1 - passed) * angle), Math.sin(passed * angle)];
    const [x, y, z] = start.map((value, axis) => weights[0] * value + weights[1] * end[axis]);
    const lon = degrees(Math.atan2(y, x));
    const before = points[points.length - 1][1];
    points.push([degrees(Math.atan2(z, Math.hypot(x, y))), lon + 360 * Math.round((before - lon) / 360)]);
  }
  return points;
}

const count = (number) => number.toLocaleString("en-US");
function kmText(km) {
  if (km < 10) return `${km.toFixed(km < 1 ? 2 : 1)} km`;
  return `${count(Math.round(km))} km`;
}
function placeText([lat, lon]) {
  const side = (value, names) => `${Math.abs(value).toFixed(3)}° ${names[value < 0 ? 1 : 0]}`;
  return `${side(lat, "NS")}, ${side(lon, "EW")}`;
}
function shortNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

const styles = getComputedStyle(document.documentElement);
const color = (name) => styles.getPropertyValue(`--${name}`).trim();

// Whatever is drawn with colours on a canvas is drawn again when the colour scheme changes.
const redraws = [];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));

const tip = host("tip");
function showTip(x, y, lines) {
  tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  const top = y + 14 + height > innerHeight ? y - 14 - height : y + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
function hideTip() {
  tip.hidden = true;
}

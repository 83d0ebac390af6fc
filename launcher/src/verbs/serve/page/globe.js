// A globe on a canvas, to turn and to zoom: the half of the Earth that faces the viewer, in orthographic projection.
// North is always up. Points are unit vectors [x, y, z], with z towards the north pole and x towards 0° N, 0° E.

const TURN_MS = 900;
// Hidden ends of shores are drawn at this many radii from the middle, so that lines between them do not cross the globe.
const OUTSIDE = 3;
// Pixels per number of a shade, in each direction.
const GRAIN = 2;

const vectorOf = ([lat, lon]) => {
  const [north, east] = [radians(lat), radians(lon)];
  return [Math.cos(north) * Math.cos(east), Math.cos(north) * Math.sin(east), Math.sin(north)];
};
const dotProduct = (one, other) => one[0] * other[0] + one[1] * other[1] + one[2] * other[2];

// The shores: longitudes and latitudes in degrees, and the same points as vectors.
const shores = land.map((ring) => {
  const places = [];
  for (let at = 0; at < ring.length; at += 2) places.push([ring[at + 1] / 100, ring[at] / 100]);
  return { places, vectors: places.map(vectorOf) };
});

// Whether a place is within a ring: a line from it to the east crosses the ring an odd number of times.
function isWithin([lat, lon], { places }) {
  let crossings = 0;
  places.forEach(([toLat, toLon], at) => {
    const [fromLat, fromLon] = places[(at || places.length) - 1];
    if ((fromLat > lat) === (toLat > lat)) return;
    const shore = fromLon + ((lat - fromLat) / (toLat - fromLat)) * (toLon - fromLon);
    crossings += [-360, 0, 360].filter((turn) => shore + turn > lon).length;
  });
  return crossings % 2 === 1;
}

class Globe extends WorldMap {
  heightFor(width) {
    return Math.min(width, 640);
  }
  // Pixels.
  get radius() {
    return 0.47 * Math.min(this.width, this.height) * this.zoom;
  }
  // Pixels per degree, in the middle.
  get scale() {
    return radians(this.radius);
  }
  get kmPerPixel() {
    return EARTH_RADIUS_KM / this.radius;
  }
  get latMax() {
    return 90;
  }

  // The directions to the right, up, and towards the viewer.
  axes() {
    const { lat, lon } = this.center;
    return [vectorOf([0, lon + 90]), vectorOf([lat + 90, lon]), vectorOf([lat, lon])];
  }
  // The position of a point, NaN on the hidden half.
  position(vector, [right, up, toward] = this.axes()) {
    if (dotProduct(vector, toward) < 0) return [NaN, NaN];
    const { radius } = this;
    return [this.width / 2 + radius * dotProduct(vector, right), this.height / 2 - radius * dotProduct(vector, up)];
  }
  pixel(place) {
    return this.position(vectorOf(place));
  }
  // The point at a position, or `null` beside the globe.
  pointAt(x, y) {
    const [right, up, toward] = this.axes();
    const [across, along] = [(x - this.width / 2) / this.radius, (this.height / 2 - y) / this.radius];
    const square = 1 - across * across - along * along;
    if (square < 0) return null;
    const depth = Math.sqrt(square);
    return right.map((_, axis) => across * right[axis] + along * up[axis] + depth * toward[axis]);
  }

  reset() {
    this.turnTo([this.center.lat, this.center.lon], 1);
  }

  // Turns to the first place, and shows as much as is needed for all places, with some room around them.
  fit(places) {
    const farthest = Math.max(...places.map((place) => distanceKm(places[0], place))) / EARTH_RADIUS_KM;
    const wanted = farthest < Math.PI / 2 ? 0.8 / Math.sin(farthest) : 1;
    this.turnTo(places[0], Math.max(1, Math.min(ZOOM_MAX, wanted)));
  }

  // Turns until a place is in the middle: at once for people who want less motion.
  turnTo(place, zoom = this.zoom) {
    const [path, zoomBefore, begun] = [arc([this.center.lat, this.center.lon], place), this.zoom, performance.now()];
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const turn = (now) => {
      if (this.turn !== turn) return;
      const time = isStill ? 1 : Math.max(0, Math.min(1, (now - begun) / TURN_MS));
      const passed = time * time * (3 - 2 * time);
      const [at, last] = [passed * (path.length - 1), path.length - 1];
      const [from, to] = [path[Math.floor(at)], path[Math.min(last, Math.floor(at) + 1)]];
      const [lat, lon] = from.map((value, axis) => value + (at % 1) * (to[axis] - value));
      this.center = { lat, lon };
      this.zoom = zoomBefore * (zoom / zoomBefore) ** passed;
      this.draw();
      if (time < 1) requestAnimationFrame(turn);
      else this.turn = null;
    };
    this.turn = turn;
    turn(begun);
  }

  press(event) {
    this.turn = null;
    super.press(event);
  }
  // What is at the position x, y stays there. A pan is exact only in the middle, so it is repeated.
  zoomBy(factor, x = this.width / 2, y = this.height / 2) {
    const held = this.pointAt(x, y);
    this.zoom = Math.max(1, Math.min(ZOOM_MAX, this.zoom * factor));
    for (let round = 0; round < 4; round += 1) {
      const [nowX, nowY] = held ? this.position(held) : [x, y];
      // A place near the limb may have turned to the far side.
      if (Number.isNaN(nowX)) break;
      this.pan(x - nowX, y - nowY);
    }
  }
  pan(dx, dy) {
    this.turn = null;
    const east = dx / this.scale / Math.max(0.1, Math.cos(radians(this.center.lat)));
    this.center = { lat: this.center.lat + dy / this.scale, lon: this.center.lon - east };
    this.draw();
  }

  disc(radius = this.radius) {
    const disc = new Path2D();
    disc.arc(this.width / 2, this.height / 2, radius, 0, 2 * Math.PI);
    return disc;
  }

  drawWorld() {
    const { context } = this;
    context.clearRect(0, 0, this.width, this.height);
    context.fillStyle = color("sea");
    context.fill(this.disc());
    context.save();
    context.clip(this.disc());
    this.drawLand();
    this.drawGrid();
    context.restore();
    context.strokeStyle = color("shore");
    context.lineWidth = 1;
    context.stroke(this.disc());
  }

  drawLand() {
    const { context, center } = this;
    const [inside, lines] = [new Path2D(), new Path2D()];
    const [axes, antipode] = [this.axes(), [-center.lat, center.lon > 0 ? center.lon - 180 : center.lon + 180]];
    for (const ring of shores) {
      const [right, up, toward] = axes.map((axis) => ring.vectors.map((vector) => dotProduct(vector, axis)));
      if (toward.every((depth) => depth < 0)) continue;
      let isDrawing = false;
      ring.places.forEach(([, lon], at) => {
        const isHidden = toward[at] < 0;
        const factor = this.radius * (isHidden ? OUTSIDE / Math.hypot(right[at], up[at]) : 1);
        const [x, y] = [this.width / 2 + factor * right[at], this.height / 2 - factor * up[at]];
        if (at === 0) inside.moveTo(x, y);
        else inside.lineTo(x, y);
        if (isDrawing && !isHidden) lines.lineTo(x, y);
        else lines.moveTo(x, y);
        // No shore follows the 180th meridian: the outlines are only cut there.
        isDrawing = !isHidden && Math.abs(lon) !== 180;
      });
      inside.closePath();
      // The hidden part of a ring around the antipode goes around the globe the other way.
      if (isWithin(antipode, ring)) inside.addPath(this.disc(OUTSIDE * this.radius));
    }
    context.fillStyle = color("land");
    context.fill(inside, "evenodd");
    context.strokeStyle = color("shore");
    context.lineWidth = 0.8;
    context.stroke(lines);
  }

  drawGrid() {
    const { center, context } = this;
    const half = degrees(Math.asin(Math.min(1, Math.hypot(this.width, this.height) / 2 / this.radius)));
    const [south, north] = [Math.max(-90, center.lat - half), Math.min(90, center.lat + half)];
    const nearPole = Math.max(-south, north);
    const wide = nearPole > 85 ? 180 : Math.min(180, half / Math.cos(radians(nearPole)));
    const sizes = [0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30];
    const step = sizes.find((size) => size * this.scale >= 60) ?? 30;
    const eastStep = sizes.find((size) => size >= step && wide / size <= 18) ?? 30;
    const multiples = (from, to, size) => {
      const [first, last] = [Math.ceil(from / size), Math.floor(to / size)];
      return Array.from({ length: last - first + 1 }, (_, at) => (first + at) * size);
    };
    const draw = (places) => this.line(places, color("grid"), 0.8);
    const between = (from, to) => Array.from({ length: 91 }, (_, at) => from + ((to - from) * at) / 90);
    const [west, east] = [center.lon - wide, center.lon + wide];
    context.globalAlpha = 0.7;
    multiples(west, east, eastStep).forEach((lon) => draw(between(south, north).map((lat) => [lat, lon])));
    multiples(south, north, step).forEach((lat) => draw(between(west, east).map((lon) => [lat, lon])));
    context.globalAlpha = 1;
  }

  line(places, style, width) {
    const { context } = this;
    context.strokeStyle = style;
    context.lineWidth = width;
    context.beginPath();
    const axes = this.axes();
    let isDrawing = false;
    for (const place of places) {
      const [x, y] = this.position(vectorOf(place), axes);
      if (isDrawing) context.lineTo(x, y);
      else context.moveTo(x, y);
      isDrawing = !Number.isNaN(x);
    }
    context.stroke();
  }

  // Covers the globe with a colour. Its opacity at a point, from 0 to 1, is `opacityOf(x, y, z)`.
  shade(style, opacityOf) {
    this.layer ??= element("canvas");
    const [width, height] = [Math.ceil(this.width / GRAIN), Math.ceil(this.height / GRAIN)];
    [this.layer.width, this.layer.height] = [width, height];
    const layer = this.layer.getContext("2d");
    const image = layer.createImageData(width, height);
    const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(style.slice(at, at + 2), 16));
    const [right, up, toward] = this.axes();
    for (let row = 0; row < height; row += 1) {
      const along = (this.height / 2 - (row + 0.5) * GRAIN) / this.radius;
      for (let column = 0; column < width; column += 1) {
        const across = ((column + 0.5) * GRAIN - this.width / 2) / this.radius;
        const square = 1 - across * across - along * along;
        if (square < 0) continue;
        const depth = Math.sqrt(square);
        const coordinate = (axis) => across * right[axis] + along * up[axis] + depth * toward[axis];
        const at = 4 * (row * width + column);
        [image.data[at], image.data[at + 1], image.data[at + 2]] = [red, green, blue];
        image.data[at + 3] = 255 * opacityOf(coordinate(0), coordinate(1), coordinate(2));
      }
    }
    layer.putImageData(image, 0, 0);
    this.context.drawImage(this.layer, 0, 0, width * GRAIN, height * GRAIN);
  }
}

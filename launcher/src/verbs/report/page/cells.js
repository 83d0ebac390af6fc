// Densities over HEALPix cells of several orders (Górski et al. 2005, nested scheme). A cell has the number 4^(order + 1)
// plus its number among the cells of its order.

// For each of the 12 base cells: its southernmost corner, counted from the north pole, and its middle in units of 45°.
const BASE_SOUTH = [2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4];
const BASE_EAST = [1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7];
const LEVELS = 24;

const orderOf = (cell) => Math.floor(Math.log2(cell) / 2) - 1;

// A point of a base cell as [lat, lon]: `x` and `y` run from 0 to 1, to the north-east and the north-west. Longitudes of a
// base cell do not jump; at a pole, the longitude is null.
function pointOf(base, x, y) {
  const fromNorth = BASE_SOUTH[base] - x - y;
  const fromPole = Math.min(1, fromNorth, 4 - fromNorth);
  const height = fromPole < 1 ? (1 - fromPole ** 2 / 3) * Math.sign(2 - fromNorth) : (2 * (2 - fromNorth)) / 3;
  const lat = degrees(Math.asin(Math.max(-1, Math.min(1, height))));
  return [lat, fromPole < 1e-9 ? null : 45 * (BASE_EAST[base] + (x - y) / fromPole)];
}

// The outline of a cell, as [lat, lon].
function outlineOf(cell) {
  const order = orderOf(cell);
  const [side, number] = [2 ** order, cell - 4 ** (order + 1)];
  const base = Math.floor(number / side ** 2);
  let [west, south] = [0, 0];
  for (let bit = 0; bit < order; bit += 1) {
    west += (Math.floor(number / 4 ** bit) % 2) * 2 ** bit;
    south += (Math.floor(number / 4 ** bit / 2) % 2) * 2 ** bit;
  }
  // On the map, the edges of large cells and of cells near the poles are curved.
  const parts = Math.max(4, 16 / side);
  const corners = [[0, 0], [1, 0], [1, 1], [0, 1]];
  const points = corners.flatMap(([x, y], at) => {
    const [toX, toY] = corners[(at + 1) % 4];
    return Array.from({ length: parts }, (_, part) => {
      const passed = part / parts;
      return pointOf(base, (west + x + (toX - x) * passed) / side, (south + y + (toY - y) * passed) / side);
    });
  });
  // On the map, a pole is a line.
  return points.flatMap(([lat, lon], at) => {
    if (lon !== null) return [[lat, lon]];
    const beside = [points.at(at - 1), points[(at + 1) % points.length]];
    return beside.map((point) => [lat, point[1]]);
  });
}

// The outlines of the cells by their level, from 1 to LEVELS, which goes with the square root of the density.
function levelsOf(cells) {
  const densities = cells.map(([cell, probability]) => Math.max(0, probability) * 4 ** orderOf(cell));
  const peak = densities.reduce((most, density) => Math.max(most, density), 0) || 1;
  const levels = Array.from({ length: LEVELS + 1 }, () => []);
  cells.forEach(([cell], at) => {
    const level = Math.round(LEVELS * Math.sqrt(densities[at] / peak));
    if (level === 0) return;
    const points = outlineOf(cell);
    const lons = points.map((point) => point[1]);
    levels[level].push({ points, west: Math.min(...lons), east: Math.max(...lons) });
  });
  return levels;
}

// Cells of one level are one shape, so that no lines appear between them.
function paintCells(map, step) {
  step.levels ??= levelsOf(step.cells);
  const { context } = map;
  context.fillStyle = color("density");
  step.levels.forEach((outlines, level) => {
    context.globalAlpha = (0.8 * level) / LEVELS;
    context.beginPath();
    for (const turn of [-360, 0, 360]) {
      for (const { points, west, east } of outlines) {
        if (map.x(east + turn) < 0 || map.x(west + turn) > map.width) continue;
        points.forEach(([lat, lon], at) => {
          if (at === 0) context.moveTo(map.x(lon + turn), map.y(lat));
          else context.lineTo(map.x(lon + turn), map.y(lat));
        });
        context.closePath();
      }
    }
    context.fill();
  });
  context.globalAlpha = 1;
}

// The smallest area that holds half of the probability, km².
function halfAreaKm2(cells) {
  const areas = cells.map(([cell, probability]) => ({ probability, share: 1 / (12 * 4 ** orderOf(cell)) }));
  areas.sort((a, b) => b.probability / b.share - a.probability / a.share);
  const wanted = areas.reduce((sum, area) => sum + area.probability, 0) / 2;
  let [held, share] = [0, 0];
  for (const area of areas) {
    const part = Math.min(1, (wanted - held) / area.probability);
    if (!(part > 0)) break;
    [held, share] = [held + part * area.probability, share + part * area.share];
  }
  return share * 4 * Math.PI * EARTH_RADIUS_KM ** 2;
}

// Fills the sections that the page has.

if (host("error-curve")) drawErrorCurve(host("error-curve"));
if (host("calibration-curve")) drawCalibration(host("calibration-curve"));
if (host("world") && data.systems.length) drawAnswers(host("world"), drawPhotos(host("photo")));
if (host("training-curves")) drawTraining(host("training-curves"));
document.documentElement.dataset.ready = "true";

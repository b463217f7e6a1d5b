// Loaded into Azurite before its own code, to disable the garbage collection of content that no blob refers to. It would
// run every ten minutes, for a time that grows with the square of the number of blobs, and block all requests meanwhile. It
// may also delete content that was just uploaded, before its blob is committed.
const path = require("path");

const constants = require(path.join(path.dirname(process.argv[1]), "utils", "constants"));

constants.DEFAULT_GC_INTERVAL_MS = 2 ** 31 - 1; // the maximum of a timer: 24 days

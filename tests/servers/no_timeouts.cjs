// Loaded into JavaScript servers before their own code, to disable the timeouts of connections and requests.
// By default, Node.js closes connections that were idle for 5 s. On a busy machine it also closes connections on which the
// next request has arrived, so that the client cannot know whether that request was processed.
const { Server } = require("http");

const { listen } = Server.prototype;

Server.prototype.listen = function (...options) {
  Object.assign(this, { keepAliveTimeout: 0, headersTimeout: 0, requestTimeout: 0, timeout: 0 });
  return listen.apply(this, options);
};

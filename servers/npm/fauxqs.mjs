// Starts fauxqs on loopback with its data in a folder: `node fauxqs.mjs PORT FOLDER`. By itself it listens to everybody, so the host is set on the way.
import net from "node:net";
import { startFauxqs } from "fauxqs";

const [port, folder] = process.argv.slice(2);
const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (options, ...rest) {
  return listen.call(this, { ...options, host: "127.0.0.1" }, ...rest);
};
await startFauxqs({ port: Number(port), dataDir: folder, logger: false });

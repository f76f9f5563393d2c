"""TCP between tasks, through connections that can be cut, delayed and reset: one `Link` for each task and each peer that it calls."""

import asyncio
import contextlib
import socket
import struct
import threading

CHUNK = 1 << 16


class Link:
    """Forwards what arrives at its own address to `target`. Cut, it keeps all connections open, and accepts more."""

    def __init__(self, network, target):
        self.network, self.target = network, target
        self.delay = 0.0
        self.connections = set()
        self.open = {}
        self.address = network.call(self._listen())

    async def _listen(self):
        self.open = {True: asyncio.Event(), False: asyncio.Event()}
        for event in self.open.values():
            event.set()
        self.listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return "{}:{}".format(*self.listener.sockets[0].getsockname())

    async def _accept(self, reader, writer):
        host, port = self.target.rsplit(":", 1)
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            return self._abort(writer)
        pair = (writer, back)
        self.connections.add(pair)
        await asyncio.gather(self._pump(reader, back, True), self._pump(there, writer, False))
        self.connections.discard(pair)

    async def _pump(self, reader, writer, forth):
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self.open[forth].wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
            await self.open[forth].wait()
        with contextlib.suppress(OSError):
            writer.close()

    def _abort(self, writer):
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    def cut(self, forth=True, back=True):
        """Nothing arrives any more, from the caller (`forth`) or at it (`back`)."""

        def act():
            for direction, wanted in ((True, forth), (False, back)):
                if wanted:
                    self.open[direction].clear()

        self.network.do(act)

    def heal(self):
        self.delay = 0.0
        self.network.do(lambda: [event.set() for event in self.open.values()])

    def reset(self):
        self.network.do(lambda: [self._abort(writer) for pair in self.connections for writer in pair])


class Network:
    """The thread that all links share."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def do(self, function):
        self.loop.call_soon_threadsafe(function)

    def close(self):
        async def end():
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.call(end())
        self.do(self.loop.stop)
        self.thread.join()
        self.loop.close()

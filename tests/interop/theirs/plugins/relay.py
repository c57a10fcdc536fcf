"""A child process for stdio: what comes in goes to a socket, what comes from there goes out.

The server of such a test is in the test's own process, where its handlers share events with
it. Between them is a real child, with real pipes.
"""

import selectors
import socket
import sys

READ = 65_536


def main() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        chosen = selectors.DefaultSelector()
        chosen.register(0, selectors.EVENT_READ)
        chosen.register(server, selectors.EVENT_READ)
        with open(0, "rb", buffering=0) as wire_in, open(1, "wb", buffering=0) as wire_out:
            while True:
                for key, _ in chosen.select():
                    if key.fd == 0:
                        data = wire_in.read(READ)
                        if not data:
                            # The server says its last words.
                            server.shutdown(socket.SHUT_WR)
                            chosen.unregister(0)
                        else:
                            server.sendall(data)
                        continue
                    data = memoryview(server.recv(READ))
                    if not data:
                        return
                    while data:
                        data = data[wire_out.write(data) or 0 :]


if __name__ == "__main__":
    main()

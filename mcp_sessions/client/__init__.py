"""The resuming client: what happens between an application's MCP client and a network.

From the application to the network:

* ``sdk`` is the transport of the SDK's client; ``task_calls`` waits there for tasks.
* ``resuming`` gets every message of both sides, and gives it to the part that it is for.
* ``sending`` sends what the application says; ``listening`` keeps the modern event stream open.
* ``connection_loss`` is what happens when a connection is lost.
* ``control`` opens a connection, and starts, resumes and ends sessions on it.
* ``sessions`` is the table of sessions; ``state``, ``application`` and ``requests`` have the rest
  of what is known, and ``jar`` keeps it for the next run.
* ``messages`` reads and makes raw messages; ``reports`` is what the application is told.
* ``dialer`` is the port that each transport's client side implements.
"""

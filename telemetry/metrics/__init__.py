"""Pure arithmetic on the metrics of engines and routers: no I/O, no database, no clock. Rules: README.md."""

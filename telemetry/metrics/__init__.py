"""Pure arithmetic over what engines and routers count: no I/O, no database, no clock (rules: README.md)."""

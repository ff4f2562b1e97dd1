"""The REST API: doors that parse, call one service and answer."""

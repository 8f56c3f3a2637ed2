"""One writer process for many: appends over a socket."""

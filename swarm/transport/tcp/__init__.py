"""Plain sockets: their options, binding, connecting, and splicing two of them."""

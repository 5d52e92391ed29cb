"""Control-plane messages, their encoding and the sockets that carry them. The only home of zmq."""

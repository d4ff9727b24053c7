"""``shoal`` of a release that speaks another protocol version."""

from shoal.swarm.protocol import messages

if __name__ == "__main__":
    messages.PROTOCOL_VERSION += 1  # before anybody imports it from there

    from shoal.peer.cli.main import main

    main()

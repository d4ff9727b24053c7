"""Package ``shoal.integrations`` of an installation: the public name of ``shoal.peer.integrations``.

A wheel has each file once, so this one stands for the link that a checkout has.
"""

from shoal.peer import integrations

__path__ = list(integrations.__path__)

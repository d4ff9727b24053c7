"""Ways on which a member is met: mapped ports, relayed and punched connections; and whom it could not meet."""

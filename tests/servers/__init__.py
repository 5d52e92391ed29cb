"""Real servers for the tests of remote tiers: started on loopback, once a session, ended by their pid."""

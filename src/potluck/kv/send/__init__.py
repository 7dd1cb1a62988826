"""The sender: an outbox that receivers come to, shipments in it, and what each still has to send."""

"""What routers say of the signature of what they run."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0017_pool_warm_up")]

    operations = [
        migrations.AddField(
            model_name="router",
            name="signature_state",
            field=models.CharField(blank=True, default="", max_length=20, db_default=""),
        ),
        migrations.AddField(
            model_name="router",
            name="signature_key",
            field=models.CharField(blank=True, default="", max_length=16, db_default=""),
        ),
        migrations.AddField(
            model_name="router", name="signature_expires_at", field=models.DateTimeField(blank=True, null=True)
        ),
    ]

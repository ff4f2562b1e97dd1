"""Who is kept from guessing, and the table of Django's cache, in which failures are counted.

The cache's table is not logged: it is emptied after a crash, and costs no write-ahead log.
"""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

CACHE = """
create unlogged table controlplane_cache (
    cache_key varchar(255) primary key,
    value text not null,
    expires timestamptz not null
);
create index controlplane_cache_expires on controlplane_cache (expires);
"""


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0005_router_settings'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='SignInLock',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('address', models.CharField(blank=True, max_length=45)),
                ('until', models.DateTimeField()),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='sign_in_locks', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-until',),
                'constraints': [models.UniqueConstraint(fields=('user', 'address'), name='one_lock_per_address')],
            },
        ),
        migrations.RunSQL(CACHE, "drop table controlplane_cache;"),
    ]

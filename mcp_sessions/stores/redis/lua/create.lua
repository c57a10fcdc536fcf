-- needs: session log
-- ARGV: now, idle, log epoch, then the fields of a new session
local now, idle, epoch = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
redis.call('HSET', base, unpack(ARGV, 4))
save(new_log('events', epoch))
move_deadline(now, idle, seconds(redis.call('HGET', base, 'ends')))
return record()

-- needs: session
-- ARGV: now, idle times (3)
local ends, mode = unpack(redis.call('HMGET', base, 'ends', 'mode'))
local now = tonumber(ARGV[1])
if ends and now < seconds(ends) then
    move_deadline(now, idle_of(mode, ARGV[2], ARGV[3], ARGV[4]), seconds(ends))
end
return false
